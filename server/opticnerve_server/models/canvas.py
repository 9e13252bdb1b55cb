"""How Llama 4 lays an image on tiles: scaled without distortion onto the canvas of tiles that fits it best, padded.

`get_best_fit` and `get_max_res_without_distortion` of transformers' Llama4ImageProcessor. Which numbers are float32
there and which are float64 decides sizes, so it is repeated here.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .tiles import View, tiles_of_one_pixel, with_overview


@dataclass(frozen=True, slots=True, kw_only=True)
class BestCanvas:
    """Up to `most` tiles, then the whole image as one more.

    The canvas is the smallest on which the image need not shrink, else the one on which it shrinks least. It is not
    enlarged to fill its canvas, but up to one tile, unless `fill` is set, which also takes the largest canvas.
    """

    side: int
    most: int
    fill: bool = False

    @property
    def max_tiles(self) -> int:
        """See TileRule."""
        return self.most + (self.most > 1)

    def __call__(self, height: int, width: int) -> tuple[View, ...]:
        """See TileRule."""
        rows, columns = self._canvas(height, width)
        tiled = View(
            top=0,
            left=0,
            height=height,
            width=width,
            rows=rows,
            columns=columns,
            resized=self._resized(height, width, rows * self.side, columns * self.side),
        )
        return with_overview(tiled)

    def tiling(self, rows: int, columns: int) -> tuple[View, ...]:
        """See TileRule."""
        return with_overview(tiles_of_one_pixel(rows, columns)) if rows * columns <= self.most else ()

    def _canvas(self, height: int, width: int) -> tuple[int, int]:
        canvases = _canvases(self.most)
        across = (canvases[:, 1] * self.side).astype(np.float32) / np.float32(width)
        down = (canvases[:, 0] * self.side).astype(np.float32) / np.float32(height)
        scales = np.minimum(across, down)
        enlarging = scales[scales >= 1]
        if not len(enlarging):
            best = scales.max()
        else:
            best = enlarging.max() if self.fill else enlarging.min()
        fitting = canvases[scales == best]
        rows, columns = fitting[np.argmin(fitting.prod(axis=1))].tolist()
        return rows, columns

    def _resized(self, height: int, width: int, canvas_height: int, canvas_width: int) -> tuple[int, int]:
        """Height and width on the canvas, the aspect kept."""
        down, target_height = self._scale(height, canvas_height)
        across, target_width = self._scale(width, canvas_width)
        if across < down:
            size = min(math.floor(height * across), target_height), target_width
        else:
            size = target_height, min(math.floor(width * down), target_width)
        return max(size[0], 1), max(size[1], 1)

    def _scale(self, length: int, canvas: int) -> tuple[float | np.float32, int]:
        """The scale to a side's target, and that target. Where it is the canvas's own, officially a tensor, float32."""
        own = length if self.fill else max(length, self.side)
        if self.fill or canvas < own:
            return np.float32(canvas) / np.float32(length), canvas
        return own / length, own


@functools.cache
def _canvases(most: int) -> npt.NDArray[np.int64]:
    """Rows and columns of every canvas of up to `most` tiles."""
    return np.array([(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)])
