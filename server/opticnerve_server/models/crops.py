"""The planner of DeepSeek-OCR: an image whole, laid into a grey square, and cut into crops of a grid."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ..types import ItemPlan, Layout, Span
from .resize import pillow_bicubic
from .two_path import GLOBAL, LOCAL, TwoPathPlanner, Views

SAM_PATCH = 16
MERGE = 4
"""Two convolutions of stride 2 stand between SAM's patches and tokens."""

BACKGROUND = 127
"""Level of grey around a whole view that is no square."""


class DeepseekOcrPlanner(TwoPathPlanner):
    """See `base.Planner`. Pixels are uint8 RGB.

    A row of tokens ends with a newline, an image with a separator: rows of the embedding too.
    """

    def __init__(self, architecture: str, layout: Layout, *, whole: int, crop: int, most: int) -> None:
        """Sides of views in pixels; `most` crops."""
        self.whole_tokens, self.crop_tokens = (-(-(side // SAM_PATCH) // MERGE) for side in (whole, crop))
        self.most = most
        super().__init__(
            architecture,
            layout,
            {
                GLOBAL: Views(
                    side=whole,
                    patches=(whole // SAM_PATCH) ** 2,
                    tokens=self.whole_tokens * (self.whole_tokens + 1),
                    nbytes=whole**2 * 3,
                    margin=1,  # the separator
                ),
                LOCAL: Views(
                    side=crop,
                    patches=(crop // SAM_PATCH) ** 2,
                    tokens=self.crop_tokens**2,
                    nbytes=crop**2 * 3,
                    most=most,
                    margin=self.crop_tokens,  # newlines, where crops stand one above another
                ),
            },
        )

    def crops(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the crops of an image: the grid of 2 to `most` whose shape is nearest to the image's.

        None where both sides are within a crop's. Of two equally near grids the one of more crops is taken if the image
        has more than half of its pixels.
        """
        side = self.views[LOCAL].side
        if max(height, width) <= side:
            return 0, 0
        sides = range(1, self.most + 1)
        grids = sorted(((j, i) for i in sides for j in sides if 2 <= i * j <= self.most), key=math.prod)
        nearest, best = float("inf"), (0, 0)
        for rows, columns in grids:
            off = abs(width / height - columns / rows)
            if off < nearest or (off == nearest and height * width > 0.5 * side**2 * rows * columns):
                nearest, best = off, (rows, columns)
        return best

    def plan_image(self, height: int, width: int) -> ItemPlan:
        """See TwoPathPlanner. Size and grid are those of the whole view.

        The rows are those of the crops as one picture, line by line, then those of the whole view and the separator.
        """
        rows, columns = self.crops(height, width)
        picture = rows * self.crop_tokens * (columns * self.crop_tokens + 1) if rows else 0
        whole = self.whole_tokens * (self.whole_tokens + 1) + 1
        spans = [Span("tile", picture)] if rows else []
        side = self.views[GLOBAL].side
        return ItemPlan(
            kind="image",
            height=side,
            width=side,
            grid=(1, side // SAM_PATCH, side // SAM_PATCH),
            merge=MERGE,
            tokens=picture + whole,
            paths=self.units(rows * columns),
            spans=(*spans, Span("global", whole)),
        )

    def crops_of(self, plan: ItemPlan) -> tuple[int, int]:
        """Rows and columns of an item's crops, out of its plan."""
        count, side = plan.paths[LOCAL].units, self.crop_tokens
        if not count:
            return 0, 0
        rows = (plan.spans[0].rows - count * side**2) // side  # a newline for each line of tokens
        return rows, count // rows

    def fill_pixels(
        self, media: npt.NDArray[np.uint8] | Iterable[npt.NDArray[np.uint8]], plan: ItemPlan, out: npt.NDArray[np.uint8]
    ) -> None:
        """See `base.Planner.fill_pixels`."""
        assert isinstance(media, np.ndarray)
        end, side, crop = plan.paths[GLOBAL].pixel_bytes, self.views[GLOBAL].side, self.views[LOCAL].side
        self._lay_whole(media, out[:end].reshape(side, side, 3))
        rows, columns = self.crops_of(plan)
        if rows:
            picture = np.empty((rows * crop, columns * crop, 3), np.uint8)
            pillow_bicubic(media, picture)
            cut = picture.reshape(rows, crop, columns, crop, 3).swapaxes(1, 2)
            out[end:].reshape(cut.shape)[...] = cut

    def _lay_whole(self, media: npt.NDArray[np.uint8], canvas: npt.NDArray[np.uint8]) -> None:
        """The image as large as it fits, in the middle of grey; roundings as of Pillow's ImageOps.pad."""
        height, width = media.shape[:2]
        side = canvas.shape[0]
        size = (round(height / width * side), side) if width > height else (side, round(width / height * side))
        canvas[...] = BACKGROUND
        if min(size) == 0:  # so thin that nothing is left of it
            return
        top, left = round((side - size[0]) * 0.5), round((side - size[1]) * 0.5)
        picture = np.empty((*size, 3), np.uint8)
        pillow_bicubic(media, picture)
        canvas[top : top + size[0], left : left + size[1]] = picture
