"""The planner of the Step3-VL family: an image whole, and cut into windows whose side follows from its shape.

Sizes follow the published processor. Copies of it differ at a longer side of exactly `size`, where the authors' code
and transformers' agree and are followed, and at exact fifths of a window, where each model keeps its own: see SNAPS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from ..types import ItemPlan, Layout, Span
from .base import PlanError
from .resize import pillow_bilinear
from .two_path import GLOBAL, LOCAL, TwoPathPlanner, Views

THIN, THIN_ASPECT = 32, 4
"""An image with a side below THIN pixels and an aspect over THIN_ASPECT is laid into a black square first."""

LEVELS = 256
"""Steps of a level of a pixel: views are resized after they became floats, so their pixels are 16-bit fixed point."""

MANY_CROPS = 36
"""Crops of the largest square. Thin strips have more, which run eagerly where no graph has room."""


class Cut(NamedTuple):
    """How an image is seen: sizes are (height, width)."""

    squared: bool  # it is laid into the upper left of a black square first
    whole: tuple[int, int]  # before the whole view is made of it
    snapped: tuple[int, int]  # before the crops are cut out of it
    window: int  # side of a crop there
    rows: int
    columns: int


def snap_published(side: int, window: int) -> int:
    """A side as whole windows: one more for over a fifth of one; as it is where it is below a window.

    In float64, as the published code: at exact fifths it is the rounding of the quotient that decides, 220 pixels are
    3 windows of 100.
    """
    if side < window:
        return side
    return window * (side // window + (side / window - side // window > 0.2))


def snap_exact(side: int, window: int) -> int:
    """The same in transformers, where an exact fifth is never one more."""
    return side if side < window else window * (side // window + (5 * (side % window) > window))


SNAPS: Mapping[str, Callable[[int, int], int]] = {
    "step3_vl": snap_published,
    "step_vl": snap_published,
    "step3p7": snap_exact,
}
"""By architecture: that of transformers where it has the model, else that of the authors' code."""


class Step3Planner(TwoPathPlanner):
    """See `base.Planner`. Pixels are levels x 256, uint16 little-endian, RGB."""

    def __init__(
        self, architecture: str, layout: Layout, views: Mapping[str, Views], *, largest: int, with_crops: bool
    ) -> None:
        """`largest` is the longest side in pixels that an image keeps."""
        self.largest = largest
        self.with_crops = with_crops
        self.snap = SNAPS[architecture]
        super().__init__(architecture, layout, views)

    def cut(self, height: int, width: int) -> Cut:
        """Raises PlanError for an image of which no pixel is left."""
        squared = min(height, width) < THIN and max(height, width) > THIN_ASPECT * min(height, width)
        if squared:
            height = width = max(height, width)
        longest = max(height, width)
        if longest > self.largest:
            scale = self.largest / longest
            given, (height, width) = (height, width), (int(height * scale), int(width * scale))
            if min(height, width) == 0:
                raise PlanError(
                    f"the image is {given[0]} x {given[1]} pixels (height x width): scaled to a longest side of "
                    f"{self.largest} it has none left; send a less narrow one"
                )
        short, long = min(height, width), max(height, width)
        crop = self.views[LOCAL].side
        if not self.with_crops:
            window = 0
        elif long <= self.views[GLOBAL].side:
            window = short if long > 1.5 * short else 0
        else:
            window = min(short, crop) if long > 4 * short else crop
        if not window:
            return Cut(squared, (height, width), (height, width), 0, 0, 0)
        snapped = (self.snap(height, window), self.snap(width, window))
        rows, columns = (max(1, side // window) for side in snapped)
        return Cut(squared, (height, width), snapped, window, rows, columns)

    def plan_image(self, height: int, width: int) -> ItemPlan:
        """See TwoPathPlanner. Size and grid are those of the whole view; rows are those of the crops, then its own."""
        cut = self.cut(height, width)
        whole, crop = self.views[GLOBAL], self.views[LOCAL]
        side = round(whole.patches**0.5)
        crops = tuple(
            Span("tile", crop.tokens, tile_row=row, tile_col=column)
            for row in range(cut.rows)
            for column in range(cut.columns)
        )
        return ItemPlan(
            kind="image",
            height=whole.side,
            width=whole.side,
            grid=(1, side, side),
            merge=-(-side // round(whole.tokens**0.5)),
            tokens=whole.tokens + len(crops) * crop.tokens,
            paths=self.units(len(crops)),
            spans=(*crops, Span("global", whole.tokens)),
        )

    def fill_pixels(
        self, media: npt.NDArray[np.uint8] | Iterable[npt.NDArray[np.uint8]], plan: ItemPlan, out: npt.NDArray[np.uint8]
    ) -> None:
        """See `base.Planner.fill_pixels`."""
        assert isinstance(media, np.ndarray)
        cut = self.cut(*media.shape[:2])
        if cut.squared:
            square = np.zeros((max(media.shape[:2]), max(media.shape[:2]), 3), np.uint8)
            square[: media.shape[0], : media.shape[1]] = media
            media = square
        picture = np.empty((*cut.whole, 3), np.uint8)
        pillow_bilinear(media, picture)
        side, end = self.views[GLOBAL].side, plan.paths[GLOBAL].pixel_bytes
        views = out.view("<u2")
        _lay(picture, views[: end // 2].reshape(side, side, 3))
        if not cut.window:
            return
        snapped = np.empty((*cut.snapped, 3), np.uint8)
        pillow_bilinear(picture, snapped)
        side = self.views[LOCAL].side
        crops = views[end // 2 :].reshape(cut.rows, cut.columns, side, side, 3)
        for row in range(cut.rows):
            for column in range(cut.columns):
                top, left = row * cut.window, column * cut.window
                window = np.zeros((cut.window, cut.window, 3), np.uint8)
                seen = snapped[top : top + cut.window, left : left + cut.window]
                window[: seen.shape[0], : seen.shape[1]] = seen
                _lay(window, crops[row, column])


def _lay(picture: npt.NDArray[np.uint8], canvas: npt.NDArray[np.uint16]) -> None:
    """Resize into all of `canvas`, in float, as torchvision's antialiased bilinear filter does."""
    levels = torch.from_numpy(picture).permute(2, 0, 1)[None].float()
    if picture.shape != canvas.shape:
        levels = F.interpolate(levels, canvas.shape[:2], mode="bilinear", antialias=True, align_corners=False)
    canvas[...] = (levels[0].permute(1, 2, 0) * LEVELS).round_().numpy().astype(np.uint16)
