"""Patches of a model's official processor, turned back into the frames of which they were cut.

The tower takes 8-bit pixels and normalises them itself. Patches are such pixels, normalised and put into another order:
both can be undone, and it is checked that they were.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..types import ItemPlan
from .base import PlanError

Channels: TypeAlias = tuple[float, float, float]

FLOAT32_TOLERANCE = 1e-4
"""Neighbouring pixel values differ by 0.0039 or more in patches; processors round by some 1e-7."""

NOT_PIXELS = (
    "the patches are not 8-bit pixels under this model's normalisation, which the tower takes: send the image or video "
    "itself"
)

BFLOAT16_STEP = 2.0**-7
"""One step of bfloat16 by the size of a number. Above 2 it is wider than the distance of pixel values in the CLIP
normalisation: the brightest greens and blues there may come back one level off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchFormat:
    """Patches as processors of the Qwen2-VL kind give them: [t x h x w, 3 x temporal_patch x patch x patch].

    Rows go group by group, in a group token by token in raster order, in a token of `merge` x `merge` patches likewise.
    `mean` and `std` are of values scaled to 0..1, in RGB order. The tower has `positions` columns and rows, 0: any.
    """

    patch: int
    merge: int
    temporal_patch: int
    fold: int
    mean: Channels
    std: Channels
    positions: int

    def check(self, kind: str, grid: tuple[int, int, int], shape: tuple[int, ...]) -> None:
        """Raise PlanError for a grid that this model has no such item of, or patches that are not those of the grid."""
        t, h, w = grid
        text = " x ".join(map(str, grid))
        if min(grid) < 1 or h % self.merge or w % self.merge:
            raise PlanError(
                f"the grid is {text}: all three must be positive, rows and columns multiples of {self.merge}"
            )
        if kind == "image" and t != 1:
            raise PlanError(f"the grid is {text}: an image has one temporal group, send a video as pixel_values_videos")
        if kind == "video" and t % self.fold:
            raise PlanError(f"the grid is {text}: the frames of this model's videos are a multiple of {self.fold}")
        if 0 < self.positions < max(h, w):
            raise PlanError(
                f"the grid has {h} rows and {w} columns, the tower positions for {self.positions} of each: send a "
                "smaller image or video"
            )
        expected = self._shape(grid, shape)
        if shape != expected:
            raise PlanError(
                f"the patches are of shape {list(shape)}, a grid of {text} has {list(expected)} for this model: "
                "send what its own processor returns for one item"
            )

    def restore(self, patches: npt.NDArray[np.generic], plan: ItemPlan, out: npt.NDArray[np.uint8]) -> None:
        """See `base.Planner.fill_patches`. Works on one temporal group at a time, without copies of the whole."""
        t, h, w = plan.grid
        frames = self.temporal_patch
        targets = out.reshape(-1, plan.height, plan.width, 3, copy=False)
        for group, rows in enumerate(patches.reshape(t, -1, 3 * frames * self.patch**2, copy=False)):
            pictures = self._pictures(rows[: h * w], h, w).reshape(frames, plan.height, plan.width, 3)
            if plan.kind == "video":
                targets[group * frames : (group + 1) * frames] = pictures
            elif (pictures == pictures[0]).all():
                targets[0] = pictures[0]
            else:
                raise PlanError("the frames of pixel_values differ, those of an image are equal: send a video as one")

    def _shape(self, grid: tuple[int, int, int], shape: tuple[int, ...]) -> tuple[int, ...]:
        """That of the patches of a grid, which come as `shape`."""
        return (math.prod(grid), 3 * self.temporal_patch * self.patch**2)

    def _pictures(self, rows: npt.NDArray[np.generic], h: int, w: int) -> npt.NDArray[np.uint8]:
        """The frames of one temporal group of h x w patches, with axes frame, two of rows, two of columns, channel."""
        m, p = self.merge, self.patch
        mean, std = (np.array(numbers, np.float32)[:, None] for numbers in (self.mean, self.std))
        levels = levels_of(rows.reshape(h * w, 3, -1), mean, std)
        # token row, token column, row and column of a patch, channel, frame, row and column of a pixel
        cut = levels.reshape(h // m, w // m, m, m, 3, self.temporal_patch, p, p)
        return cut.transpose(5, 0, 2, 6, 1, 3, 7, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionedFormat(PatchFormat):
    """Patches as Gemma 4's processors give them: [frames, any number, patch x patch x 3], scaled but not normalised.

    Of each frame the first h x w are its patches in raster order, the others are padding and not read.
    """

    def _shape(self, grid: tuple[int, int, int], shape: tuple[int, ...]) -> tuple[int, ...]:
        t, h, w = grid
        return (t, max(h * w, *shape[1:2]), 3 * self.patch**2)

    def _pictures(self, rows: npt.NDArray[np.generic], h: int, w: int) -> npt.NDArray[np.uint8]:
        p = self.patch
        levels = levels_of(rows.reshape(-1, 3), np.array(self.mean, np.float32), np.array(self.std, np.float32))
        # row and column of a patch, row and column of a pixel, channel
        return levels.reshape(1, h, w, p, p, 3).swapaxes(2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class RasterFormat(PatchFormat):
    """Patches of a still as Kimi-VL's processor gives them: [h x w, 3, patch, patch] in raster order, whatever a token.

    It takes no videos.
    """

    def check(self, kind: str, grid: tuple[int, int, int], shape: tuple[int, ...]) -> None:
        """See PatchFormat."""
        if kind == "video":
            raise PlanError("this model takes no videos: send their frames as images")
        PatchFormat.check(self, kind, grid, shape)

    def _shape(self, grid: tuple[int, int, int], shape: tuple[int, ...]) -> tuple[int, ...]:
        return (math.prod(grid), 3, self.patch, self.patch)

    def _pictures(self, rows: npt.NDArray[np.generic], h: int, w: int) -> npt.NDArray[np.uint8]:
        mean, std = (np.array(numbers, np.float32)[:, None] for numbers in (self.mean, self.std))
        p, levels = self.patch, levels_of(rows.reshape(h * w, 3, -1), mean, std)
        # row and column of a patch, channel, row and column of a pixel
        return levels.reshape(1, h, w, 3, p, p).transpose(0, 1, 4, 2, 5, 3)


def grid_of(positions: npt.NDArray[np.int64]) -> tuple[int, int, int]:
    """The grid of patches whose (column, row) these are, [frames, patches, 2], (-1, -1) for padding.

    Raises PlanError unless every frame has the same whole raster from its top left, and padding behind it alone.
    """
    t, patches, _ = positions.shape
    w, h = (int(last) + 1 for last in positions[0].max(axis=0))
    if 0 < h * w <= patches:
        raster = np.full((patches, 2), -1)
        raster[: h * w] = np.indices((h, w))[::-1].reshape(2, -1).T
        if (positions == raster).all():
            return (t, h, w)
    raise PlanError(
        "the positions of the patches are not (column, row) of a whole raster, row by row and the same in every frame, "
        "then (-1, -1) for padding: send those that the model's own processor returns for one item"
    )


def levels_of(
    patches: npt.NDArray[np.generic], mean: npt.NDArray[np.float32], std: npt.NDArray[np.float32]
) -> npt.NDArray[np.uint8]:
    """The pixel values of patches that are scaled to 0..1 and normalised, or pixel values already."""
    if patches.dtype == np.uint8:
        pixels: npt.NDArray[Any] = patches
        return pixels
    is_bfloat16 = patches.dtype == ml_dtypes.bfloat16
    values = patches.astype(np.float32)
    if not np.isfinite(values).all():
        raise PlanError("the patches hold NaN or infinity: send finite numbers")
    mean, std = 255 * mean, 255 * std
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers that are no pixels by far
        levels = np.rint(values * std + mean)
        off = np.abs((levels - mean) / std - values)
    allowed = np.abs(values) * BFLOAT16_STEP if is_bfloat16 else FLOAT32_TOLERANCE
    if (off > allowed).any() or levels.min() < 0 or levels.max() > 255:
        raise PlanError(NOT_PIXELS)
    exact: npt.NDArray[np.uint8] = levels.astype(np.uint8)
    return exact
