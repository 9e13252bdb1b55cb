"""The planner of the towers that see an image as slices of about one area, each of its own aspect: MiniCPM-V.

A slice is an attention segment of as many rows as it has patches, and becomes the same number of tokens whatever its
size. The slot holds the slices one behind another in the order of their rows, uint8 RGB.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from ..types import ItemPlan, Layout, PathPlan, Span
from .base import ImageItem, PathSpec, PlanError, VideoItem
from .clip import ClipRule, NoClips
from .resize import Resize, pillow_bicubic
from .tiles import NO_VIDEOS, PATH

Size = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """The slices of a picture, sizes in pixels: the whole of it, then rows x columns cells of it if it is large."""

    whole: Size
    rows: int = 0
    columns: int = 0
    cell: Size = (0, 0)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Of every slice, in order."""
        return (self.whole, *(self.cell,) * (self.rows * self.columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRule:
    """Slices of about side x side pixels in whole patches, at most `most` beside the whole picture.

    The authors' MiniCPMVImageProcessor, whose arithmetic this follows to its roundings: halves go to the even number
    of patches, sides are cut off to pixels before. Of grids as near to the aspect the one of fewest cells wins, then
    that of fewest columns; small pictures are enlarged.
    """

    side: int
    patch: int
    most: int

    def __call__(self, height: int, width: int) -> Slices:
        """For sides of at least 1."""
        count = min(math.ceil(height * width / self.side**2), self.most)
        if count <= 1:
            return Slices(whole=self._fitted(height, width))
        rows, columns = self._grid(width / height, count)
        cell_height, cell_width = _multiple(height, rows) / rows, _multiple(width, columns) / columns
        return Slices(
            whole=self._fitted(height, width),
            rows=rows,
            columns=columns,
            cell=self._fitted(cell_height, cell_width),
        )

    def whole(self, height: int, width: int) -> Size:
        """The size of the first slice."""
        return self(height, width).whole

    def _fitted(self, height: float, width: float) -> Size:
        """The size of one slice's area that has this aspect."""
        ratio = width / height
        fitted_height = int(self.side / math.sqrt(ratio))
        fitted_width = int(fitted_height * ratio)
        return _multiple(fitted_height, self.patch), _multiple(fitted_width, self.patch)

    def _grid(self, ratio: float, count: int) -> Size:
        """Rows and columns of the grid of about `count` cells whose aspect is nearest."""
        grids = [
            (cells // columns, columns)
            for cells in (count - 1, count, count + 1)
            if 1 < cells <= self.most
            for columns in range(1, cells + 1)
            if cells % columns == 0
        ]
        wanted = math.log(ratio)
        return min(grids, key=lambda grid: abs(wanted - math.log(grid[1] / grid[0])))


def _multiple(length: float, factor: int) -> int:
    return max(round(length / factor) * factor, factor)


@dataclass(kw_only=True, slots=True, eq=False)
class SlicePlanner:
    """Planner of a model of slices; see `base.Planner`. Immutable by convention, hence thread-safe.

    `queries` are the tokens of a slice. `frames` cuts each frame of a video, `most_frames` bounds how many are usual.
    `mean` and `std` are of values scaled to 0..1, in RGB order.

    A unit is so many patches that a budget of n tokens holds any n / queries slices of usual aspects, which have up to
    an eighth more than the (side / patch)^2 patches of a square one. Item and part begin with a new unit.
    """

    architecture: str
    layout: Layout
    queries: int
    rule: SliceRule
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resize: Resize = pillow_bicubic
    clips: ClipRule = NO_VIDEOS
    frames: SliceRule | None = None
    most_frames: int = 0
    paths: dict[str, PathSpec] = field(init=False)

    def __post_init__(self) -> None:
        slices = max(16, 1 + self.rule.most, self.most_frames * (1 + self.frames.most) if self.frames else 0)
        square = (self.rule.side // self.rule.patch) ** 2
        self.paths = {
            PATH: PathSpec(
                min_units=self.queries,
                max_units=slices * self.queries,
                rows_per_unit=math.ceil(square * 9 / (8 * self.queries)),
                units_per_segment=max(1, self.queries * 3 // 4),
            )
        }

    @property
    def patch(self) -> int:
        """Side of a patch in pixels."""
        return self.rule.patch

    @property
    def modalities(self) -> tuple[str, ...]:
        """See `base.Planner.modalities`."""
        return ("image",) if isinstance(self.clips, NoClips) else ("image", "video")

    def plan(self, item: ImageItem | VideoItem) -> ItemPlan:
        """See `base.Planner.plan`. Size and grid are those of the first slice."""
        if isinstance(item, VideoItem):
            return self._plan_video(item)
        if min(item.height, item.width) < 1:
            raise PlanError(
                f"the image is {item.height} x {item.width} pixels (height x width): both sides must be at least 1; "
                "send an image that has pixels"
            )
        slices = self.rule(item.height, item.width)
        whole = Span(kind="global" if slices.rows else "image", rows=self.queries)
        return self._planned("image", slices.sizes, (whole, *self._cells(slices)))

    def _plan_video(self, item: VideoItem) -> ItemPlan:
        """Every frame is a picture: its span "frame", then its cells."""
        clip = self.clips(item)
        assert self.frames is not None  # there are none only without a rule for clips, which refuses
        slices = self.frames(item.height, item.width)
        spans = tuple(
            span
            for time in clip.timestamps
            for span in (Span(kind="frame", rows=self.queries, timestamp=time), *self._cells(slices, time))
        )
        plan = self._planned("video", slices.sizes * len(clip.timestamps), spans)
        return msgspec.structs.replace(
            plan,
            grid=(len(clip.timestamps), *plan.grid[1:]),
            frame_indices=clip.frame_indices,
            timestamps=clip.timestamps,
        )

    def _planned(self, kind: str, sizes: tuple[Size, ...], spans: tuple[Span, ...]) -> ItemPlan:
        height, width = sizes[0]
        grids = tuple((height // self.patch, width // self.patch) for height, width in sizes)
        return ItemPlan(
            kind=kind,
            height=height,
            width=width,
            grid=(1, *grids[0]),
            merge=1,
            tokens=len(sizes) * self.queries,
            paths={PATH: self._path(grids)},
            spans=spans,
            grids=grids,
        )

    def _cells(self, slices: Slices, time: float = 0.0) -> list[Span]:
        return [
            Span(kind="tile", rows=self.queries, tile_row=i, tile_col=j, timestamp=time)
            for i in range(slices.rows)
            for j in range(slices.columns)
        ]

    def _path(self, grids: tuple[Size, ...]) -> PathPlan:
        patches = [rows * columns for rows, columns in grids]
        return PathPlan(
            units=-(-sum(patches) // self.paths[PATH].rows_per_unit),
            segments=len(grids),
            longest=max(patches),
            pixel_bytes=sum(patches) * self.patch**2 * 3,
        )

    def split(self, plan: ItemPlan, holds: Callable[[ItemPlan], bool]) -> list[ItemPlan]:
        """See `base.Planner.split`. Slices attend to themselves alone: an item may be cut between any two."""
        if holds(plan):
            return [plan]
        parts: list[ItemPlan] = []
        first, end = 0, len(plan.grids)
        while first < end:
            counts = range(1, end - first + 1)
            count = bisect.bisect_left(counts, True, key=lambda n: not holds(self._part(plan, first, first + n)))
            if not count:
                return [plan]
            parts.append(self._part(plan, first, first + count))
            first += count
        return parts

    def _part(self, plan: ItemPlan, first: int, end: int) -> ItemPlan:
        """The part of an item from slice `first` up to `end`."""
        grids = plan.grids[first:end]
        return msgspec.structs.replace(
            plan,
            tokens=len(grids) * self.queries,
            paths={PATH: self._path(grids)},
            spans=plan.spans[first:end],
            grids=grids,
        )

    def fill_pixels(
        self, media: npt.NDArray[np.uint8] | Iterable[npt.NDArray[np.uint8]], plan: ItemPlan, out: npt.NDArray[np.uint8]
    ) -> None:
        """See `base.Planner.fill_pixels`; arrays may be read-only. Raises ValueError for another number of frames."""
        if plan.kind == "image":
            assert isinstance(media, np.ndarray)
            self._fill(media, self.rule(*media.shape[:2]), out)
            return
        assert self.frames is not None
        for frame, target in zip(
            self.clips.prepare(media, plan), out.reshape(plan.grid[0], -1, copy=False), strict=True
        ):
            self._fill(frame, self.frames(*frame.shape[:2]), target)

    def _fill(self, picture: npt.NDArray[np.uint8], slices: Slices, out: npt.NDArray[np.uint8]) -> None:
        height, width = slices.whole
        whole, cells = np.split(out, [height * width * 3])
        self.resize(picture, whole.reshape(height, width, 3, copy=False))
        if not slices.rows:
            return
        (height, width), rows, columns = slices.cell, slices.rows, slices.columns
        refined = np.empty((rows * height, columns * width, 3), np.uint8)
        self.resize(picture, refined)
        cut = refined.reshape(rows, height, columns, width, 3).swapaxes(1, 2)
        np.copyto(cells.reshape(cut.shape, copy=False), cut)

    def plan_patches(self, kind: str, grid: tuple[int, int, int], shape: tuple[int, ...]) -> ItemPlan:
        """See `base.Planner.plan_patches`."""
        raise PlanError("patches of this model are not supported: send the image itself")

    def fill_patches(self, patches: npt.NDArray[np.generic], plan: ItemPlan, out: npt.NDArray[np.uint8]) -> None:
        """See `base.Planner.fill_patches`."""
        raise PlanError("patches of this model are not supported: send the image itself")
