"""The batches that are measured: those of published tables, clips, and random ones."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..models.base import ImageItem, VideoItem
from ..types import ItemPlan

Media = ImageItem | VideoItem


def _stills(count: int, side: int) -> list[Media]:
    return [ImageItem(side, side)] * count


def _clip(frames: int) -> list[Media]:
    """One 360p clip, every frame of which is sampled."""
    return [VideoItem(frames, 2.0, 360, 640)]


BATCHES: dict[str, list[Media]] = {
    "1x224": _stills(1, 224),
    "1x336": _stills(1, 336),
    "4x336": _stills(4, 336),
    "8x336": _stills(8, 336),
    "20x336": _stills(20, 336),
    "1x672": _stills(1, 672),
    "8x672": _stills(8, 672),
    "1x1344": _stills(1, 1344),
    "1x2048": _stills(1, 2048),
    "mixed8": [ImageItem(side, side) for side in (224, 336, 448, 560, 672, 896, 1120, 1344)],
    "clip8": _clip(8),
    "clip32": _clip(32),
    "clip128": _clip(128),
    "clip768": _clip(768),
    "clip32+4x336": [*_clip(32), *_stills(4, 336)],
}
STILLS = [name for name in BATCHES if "clip" not in name]

SIDES = (224, 1344)
"""Of random images: the logarithm of a side is uniform, so that small ones are as frequent as they are in traffic."""

MOST_IMAGES = 16


def random_batches(count: int, seed: int = 0) -> dict[str, list[Media]]:
    """So many batches of 1 to MOST_IMAGES images, any number alike often, each of a size and shape of its own."""
    draw = random.Random(seed)
    low, high = (math.log(side) for side in SIDES)

    def side() -> int:
        return round(math.exp(draw.uniform(low, high)))

    return {
        f"random{number}": [ImageItem(side(), side()) for _ in range(draw.randint(1, MOST_IMAGES))]
        for number in range(count)
    }


def random_pixels(plans: Sequence[ItemPlan]) -> list[npt.NDArray[np.uint8]]:
    """The same for the same plans."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, plan.pixel_bytes, dtype=np.uint8) for plan in plans]
