"""Tiles of a model's official processor, turned back into pixels, as `patches.py` does with patches of a grid."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .base import PlanError
from .patches import NOT_PIXELS, Channels, levels_of

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TileFormat:
    """[tiles, 3, side, side], normalised; with one more axis of 1 before it for a video.

    `mean` and `std` are of values scaled to 0..1, in RGB order. `bfloat16` means that they are normalised in it.
    """

    side: int
    mean: Channels
    std: Channels
    bfloat16: bool

    def check(self, kind: str, tiles: int, shape: tuple[int, ...]) -> None:
        """Raise PlanError unless an "image" or a "video" of so many tiles has this shape."""
        expected = ((1,) if kind == "video" else ()) + (tiles, 3, self.side, self.side)
        if shape != expected:
            raise PlanError(
                f"the tiles are of shape {list(shape)}, {tiles} of them have {list(expected)} for this model: send "
                "what its own processor returns for one item"
            )

    def restore(self, patches: npt.NDArray[np.generic], out: npt.NDArray[np.uint8]) -> None:
        """See `base.Planner.fill_patches`. Works on one tile at a time, without copies of the whole."""
        targets = out.reshape(-1, self.side, self.side, 3, copy=False)
        mean, std = (np.array(numbers, np.float32)[:, None] for numbers in (self.mean, self.std))
        for planes, target in zip(patches.reshape(len(targets), 3, -1, copy=False), targets, strict=True):
            rounded = self.bfloat16 and planes.dtype != np.uint8
            levels = _rounded_levels(planes, mean, std) if rounded else levels_of(planes, mean, std)
            target[...] = levels.reshape(3, self.side, self.side).transpose(1, 2, 0)


def _rounded_levels(planes: npt.NDArray[np.generic], mean: Floats, std: Floats) -> npt.NDArray[np.uint8]:
    """The pixel values of planes [3, pixels] that are normalised in bfloat16, step by step as torch does it.

    Each must be one of the 256 numbers that its channel can have. These ascend, and where two levels are one number
    either gives it again.
    """
    scaled = _rounded(np.arange(256, dtype=np.float32) * np.float32(1 / 255))
    numbers = _rounded(_rounded(scaled - _rounded(mean)) / _rounded(std))
    values = planes.astype(np.float32)
    levels = np.empty(values.shape, np.uint8)
    for channel, own in enumerate(numbers):
        found = np.searchsorted(own, values[channel]).clip(max=255)
        if (own[found] != values[channel]).any():
            raise PlanError(NOT_PIXELS)
        levels[channel] = found
    return levels


def _rounded(numbers: Floats) -> Floats:
    exact: Floats = numbers.astype(ml_dtypes.bfloat16).astype(np.float32)
    return exact
