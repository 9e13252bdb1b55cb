"""Sizes of images for planners: many, and those where roundings and refusals are decided."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def sizes(factor: int) -> Iterator[tuple[int, int]]:
    """Over 2000 sizes from 1 to 8192 pixels, a tenth of them beyond an aspect of 200; `factor` is a token's side."""
    random = np.random.default_rng(factor)
    yield from random.integers(1, 8193, (700, 2)).tolist()
    yield from np.exp2(random.uniform(0, 13, (700, 2))).astype(int).tolist()
    half_way = [factor * k + factor // 2 + offset for k in range(12) for offset in (-1, 0, 1)]
    yield from ((height, width) for height in half_way for width in half_way[::2])
    for short in range(1, 41):
        yield from ((short, 200 * short + more) for more in (-1, 0, 1))
        yield from ((200 * short + more, short) for more in (-1, 0, 1))
    yield from ((8192, 8192), (1, 1), (1, 8192), (8192, 1), (4096, 4096), (3584, 3584), (5000, 5000))
