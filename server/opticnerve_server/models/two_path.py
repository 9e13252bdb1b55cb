"""The planner of the models that see an image whole and, if it is large, its parts too, on a path of their own each.

Units of path `global` are whole views, those of `local` crops. Each takes as many patches and attends to itself alone.
The slot holds the whole view, then the crops in raster order, uint8 RGB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..types import ItemPlan, Layout, PathPlan, Span
from .base import ImageItem, PathSpec, PlanError, VideoItem
from .resize import Resize

GLOBAL, LOCAL = "global", "local"

NO_PATCHES = "patches of this model are not supported: send the image itself"


class CropRule(Protocol):
    """From the size of an image to its crops, (rows, columns); (0, 0) where it has none."""

    def __call__(self, height: int, width: int) -> tuple[int, int]:
        """For sides of at least 1."""
        ...

    @property
    def most(self) -> int:
        """No image has more crops than this."""
        ...


@dataclass(frozen=True, slots=True)
class ClosestGrid:
    """The grid of crops of 2 to `most` whose shape is nearest to the image's; none where both sides are within `side`.

    Of two equally near the one with more crops is taken if the image has more than half of its pixels.
    """

    side: int
    most: int

    def __call__(self, height: int, width: int) -> tuple[int, int]:
        """See CropRule."""
        if max(height, width) <= self.side or self.most < 2:
            return 0, 0
        shapes = [(j, i) for i in range(1, self.most + 1) for j in range(1, self.most + 1) if 2 <= i * j <= self.most]
        nearest, best = float("inf"), (0, 0)
        for rows, columns in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
            off = abs(width / height - columns / rows)
            enough = height * width > 0.5 * self.side**2 * rows * columns
            if off < nearest or (off == nearest and enough):
                nearest, best = off, (rows, columns)
        return best


@dataclass(kw_only=True, slots=True, eq=False)
class TwoPathPlanner:
    """Planner of a model of two paths; see `base.Planner`. Immutable by convention, hence thread-safe.

    `whole` and `crop` are sides in pixels, `patch` is a patch's; a token is `merge` patches wide, rounded up at the
    edge. A row of tokens ends with a newline, an image with a separator: rows of the embedding too.
    """

    architecture: str
    layout: Layout
    whole: int
    crop: int
    patch: int
    merge: int
    rule: CropRule
    resize: Resize
    background: int  # level of grey around a whole view that is no square
    paths: dict[str, PathSpec] = field(init=False)

    def __post_init__(self) -> None:
        self.paths = {
            GLOBAL: PathSpec(
                min_units=1,
                max_units=1,
                rows_per_unit=(self.whole // self.patch) ** 2,
                fixed_units=True,
                tokens_per_unit=self.whole_tokens * (self.whole_tokens + 1),
            ),
            LOCAL: PathSpec(
                min_units=1,
                max_units=max(1, self.rule.most),
                rows_per_unit=(self.crop // self.patch) ** 2,
                fixed_units=True,
                tokens_per_unit=self.crop_tokens**2,
            ),
        }

    @property
    def whole_tokens(self) -> int:
        """Tokens along one side of a whole view."""
        return -(-(self.whole // self.patch) // self.merge)

    @property
    def crop_tokens(self) -> int:
        """Tokens along one side of a crop."""
        return -(-(self.crop // self.patch) // self.merge)

    @property
    def modalities(self) -> tuple[str, ...]:
        """See `base.Planner.modalities`."""
        return ("image",)

    def plan(self, item: ImageItem | VideoItem) -> ItemPlan:
        """See `base.Planner.plan`. Size and grid are those of the whole view.

        The rows are those of the crops as one picture, line by line, then those of the whole view and the separator.
        """
        if isinstance(item, VideoItem):
            raise PlanError("this model takes no videos: send their frames as images")
        if min(item.height, item.width) < 1:
            raise PlanError(
                f"the image is {item.height} x {item.width} pixels (height x width): both sides must be at least 1; "
                "send an image that has pixels"
            )
        rows, columns = self.rule(item.height, item.width)
        picture = rows * self.crop_tokens * (columns * self.crop_tokens + 1) if rows else 0
        whole = self.whole_tokens * (self.whole_tokens + 1) + 1
        spans = [Span("tile", picture)] if rows else []
        side = self.whole // self.patch
        return ItemPlan(
            kind="image",
            height=self.whole,
            width=self.whole,
            grid=(1, side, side),
            merge=self.merge,
            tokens=picture + whole,
            paths={GLOBAL: self._units(GLOBAL, 1, self.whole), LOCAL: self._units(LOCAL, rows * columns, self.crop)},
            spans=(*spans, Span("global", whole)),
        )

    def _units(self, path: str, count: int, side: int) -> PathPlan:
        longest = self.paths[path].rows_per_unit if count else 0
        return PathPlan(units=count, segments=count, longest=longest, pixel_bytes=count * side**2 * 3)

    def crops_of(self, plan: ItemPlan) -> tuple[int, int]:
        """Rows and columns of an item's crops, out of its plan."""
        count, side = plan.paths[LOCAL].units, self.crop_tokens
        if not count:
            return 0, 0
        rows = (plan.spans[0].rows - count * side**2) // side  # a newline for each line of tokens
        return rows, count // rows

    def split(self, plan: ItemPlan, holds: Callable[[ItemPlan], bool]) -> list[ItemPlan]:
        """See `base.Planner.split`. The rows of a line come from several crops: an item stays whole."""
        return [plan]

    def fill_pixels(
        self, media: npt.NDArray[np.uint8] | Iterable[npt.NDArray[np.uint8]], plan: ItemPlan, out: npt.NDArray[np.uint8]
    ) -> None:
        """See `base.Planner.fill_pixels`; arrays may be read-only."""
        assert isinstance(media, np.ndarray)
        end = plan.paths[GLOBAL].pixel_bytes
        self._lay_whole(media, out[:end].reshape(self.whole, self.whole, 3))
        rows, columns = self.crops_of(plan)
        if rows:
            picture = np.empty((rows * self.crop, columns * self.crop, 3), np.uint8)
            self.resize(media, picture)
            cut = picture.reshape(rows, self.crop, columns, self.crop, 3).swapaxes(1, 2)
            out[end:].reshape(cut.shape)[...] = cut

    def _lay_whole(self, media: npt.NDArray[np.uint8], canvas: npt.NDArray[np.uint8]) -> None:
        """The image as large as it fits, in the middle of grey; roundings as of Pillow's ImageOps.pad."""
        height, width = media.shape[:2]
        side = self.whole
        if width > height:
            size = round(height / width * side), side
        else:
            size = side, round(width / height * side)
        canvas[...] = self.background
        if min(size) == 0:  # so thin that nothing is left of it
            return
        top, left = round((side - size[0]) * 0.5), round((side - size[1]) * 0.5)
        picture = np.empty((*size, 3), np.uint8)
        self.resize(media, picture)
        canvas[top : top + size[0], left : left + size[1]] = picture

    def plan_patches(self, kind: str, grid: tuple[int, int, int], shape: tuple[int, ...]) -> ItemPlan:
        """See `base.Planner.plan_patches`."""
        raise PlanError(NO_PATCHES)

    def fill_patches(self, patches: npt.NDArray[np.generic], plan: ItemPlan, out: npt.NDArray[np.uint8]) -> None:
        """See `base.Planner.fill_patches`."""
        raise PlanError(NO_PATCHES)
