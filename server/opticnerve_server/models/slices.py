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
