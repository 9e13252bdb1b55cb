"""MiniCPM-V's planner against its processor's rule, which is restated here from its description alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from image_sizes import sizes
from opticnerve_server.models.slices import SliceRule, Slices

SIDE, PATCH = 448, 14


def to_multiple(length: float, factor: int) -> int:
    return max(round(length / factor) * factor, factor)


def best_resize(width: float, height: float, enlarge: bool) -> tuple[int, int]:
    if width * height > SIDE * SIDE or enlarge:
        r = width / height
        height = int(SIDE / math.sqrt(r))
        width = int(height * r)
    return to_multiple(width, PATCH), to_multiple(height, PATCH)


def official(width: int, height: int, most: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Size of the whole picture, columns and rows (0, 0 where it is not cut), size of a cell; each (width, height)."""
    multiple = min(math.ceil(width * height / (SIDE * SIDE)), most)
    if multiple <= 1:
        return best_resize(width, height, True), (0, 0), (0, 0)
    candidates = []
    for number in (multiple - 1, multiple, multiple + 1):
        if number == 1 or number > most:
            continue
        candidates += [(m, number // m) for m in range(1, number + 1) if number % m == 0]
    log_ratio, best, least = math.log(width / height), (1, 1), float("inf")
    for columns, rows in candidates:
        error = abs(log_ratio - math.log(columns / rows))
        if error < least:
            best, least = (columns, rows), error
    columns, rows = best
    refined = to_multiple(width, columns), to_multiple(height, rows)
    cell = best_resize(refined[0] / columns, refined[1] / rows, True)
    return best_resize(width, height, False), best, cell


def ties() -> list[tuple[int, int]]:
    """Where two grids are as near: aspects between those of neighbouring grids, and both of a number and its mirror."""
    found = []
    for scale in range(40, 400, 7):
        found += [
            (10 * scale, 10 * scale),
            (20 * scale, 10 * scale),
            (30 * scale, 20 * scale),
            (40 * scale, 30 * scale),
        ]
    found += [(h, w) for h, w in [(448, 448), (448, 449), (896, 448), (897, 448), (1344, 1344), (1343, 1345)]]
    return found + [(w, h) for h, w in found]


@pytest.mark.parametrize("most", [1, 2, 9, 6])
def test_slices_are_the_official_ones(most: int) -> None:
    rule = SliceRule(side=SIDE, patch=PATCH, most=most)
    tried = {(height, width) for height, width in (*sizes(PATCH), *sizes(SIDE), *ties())}
    assert len(tried) > 4000
    for height, width in tried:
        whole, (columns, rows), cell = official(width, height, most)
        expected = Slices(whole=whole[::-1], rows=rows, columns=columns, cell=cell[::-1])
        assert rule(height, width) == expected, (height, width)


@pytest.mark.parametrize(
    ("width", "height", "grid", "whole", "cell"),
    [
        (448, 448, (0, 0), (32, 32), (0, 0)),
        (224, 224, (0, 0), (32, 32), (0, 0)),
        (640, 480, (2, 1), (28, 37), (39, 26)),
        (1344, 896, (3, 2), (26, 39), (32, 32)),
        (1920, 1080, (4, 2), (24, 43), (34, 30)),
        (1344, 1344, (3, 3), (32, 32), (32, 32)),
        (3000, 300, (6, 1), (10, 101), (25, 41)),
    ],
)
def test_known_sizes(
    width: int, height: int, grid: tuple[int, int], whole: tuple[int, int], cell: tuple[int, int]
) -> None:
    """Grid as columns and rows; whole picture and cell as patch rows and columns."""
    slices = SliceRule(side=SIDE, patch=PATCH, most=9)(height, width)
    assert (slices.columns, slices.rows) == grid
    assert np.array_equal(np.array([slices.whole, slices.cell]) // PATCH, [whole, cell])
