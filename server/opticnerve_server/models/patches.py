"""Patches of a grid model's official processor, turned back into the frames of which they were cut.

The tower takes 8-bit pixels and normalises them itself. Patches are such pixels, normalised and put into another order:
both can be undone, and it is checked that they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..types import ItemPlan
from .base import PlanError

FLOAT32_TOLERANCE = 1e-4
"""Neighbouring pixel values differ by 0.008 or more once they are normalised; processors round by some 1e-7."""

BFLOAT16_STEP = 2.0**-7
"""One step of bfloat16 by the size of a number. Above 2 it is wider than the distance of pixel values in the CLIP
normalisation: the brightest greens and blues there may come back one level off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchFormat:
    """Patches as processors of the Qwen2-VL kind give them: [t x h x w, 3 x temporal_patch x patch x patch].

    Rows go group by group, in a group token by token in raster order, in a token of `merge` x `merge` patches likewise.
    `mean` and `std` are of values scaled to 0..1, in RGB order.
    """

    patch: int
    merge: int
    temporal_patch: int
    fold: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

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
        expected = (t * h * w, 3 * self.temporal_patch * self.patch**2)
        if shape != expected:
            raise PlanError(
                f"the patches are of shape {list(shape)}, a grid of {text} has {list(expected)} for this model: "
                "send what its own processor returns for one item"
            )

    def restore(self, patches: npt.NDArray[np.generic], plan: ItemPlan, out: npt.NDArray[np.uint8]) -> None:
        """See `base.Planner.fill_patches`. Works on one temporal group at a time, without copies of the whole."""
        t, h, w = plan.grid
        m, p, frames = self.merge, self.patch, self.temporal_patch
        targets = out.reshape(-1, plan.height, plan.width, 3, copy=False)
        for group in range(t):
            levels = self._levels(patches[group * h * w : (group + 1) * h * w].reshape(h * w, 3, -1))
            # token row, token column, row and column of a patch, channel, frame, row and column of a pixel
            cut = levels.reshape(h // m, w // m, m, m, 3, frames, p, p)
            pictures = cut.transpose(5, 0, 2, 6, 1, 3, 7, 4).reshape(frames, plan.height, plan.width, 3)
            if plan.kind == "video":
                targets[group * frames : (group + 1) * frames] = pictures
            elif (pictures == pictures[0]).all():
                targets[0] = pictures[0]
            else:
                raise PlanError("the frames of pixel_values differ, those of an image are equal: send a video as one")

    def _levels(self, patches_rcv: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
        """The pixel values of [rows, channels, values] that are normalised, or pixel values already."""
        if patches_rcv.dtype == np.uint8:
            pixels: npt.NDArray[Any] = patches_rcv
            return pixels
        is_bfloat16 = patches_rcv.dtype == ml_dtypes.bfloat16
        values = patches_rcv.astype(np.float32)
        if not np.isfinite(values).all():
            raise PlanError("the patches hold NaN or infinity: send finite numbers")
        mean, std = (255 * np.array(numbers, np.float32)[:, None] for numbers in (self.mean, self.std))
        with np.errstate(over="ignore", invalid="ignore"):  # of numbers that are no pixels by far
            levels = np.rint(values * std + mean)
            off = np.abs((levels - mean) / std - values)
        allowed = np.abs(values) * BFLOAT16_STEP if is_bfloat16 else FLOAT32_TOLERANCE
        if (off > allowed).any() or levels.min() < 0 or levels.max() > 255:
            raise PlanError(
                "the patches are not 8-bit pixels under this model's normalisation, which the tower takes: send the "
                "image or video itself"
            )
        exact: npt.NDArray[np.uint8] = levels.astype(np.uint8)
        return exact
