"""Resized and normalised pixels, bit for bit those of the official torchvision-backed processors (`make_pixels.py`)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from golden.make_pixels import FILE, PROCESSORS, describe, synthetic_image
from opticnerve_server.models.base import ImageItem
from opticnerve_server.models.grid import GridPlanner
from opticnerve_server.types import ItemPlan, Layout

CASES: list[dict[str, Any]] = json.loads(FILE.read_text())["cases"]


def planner_of(name: str) -> GridPlanner:
    processor = PROCESSORS[name]
    return GridPlanner.from_processor(
        processor, architecture=name, layout=Layout(8, 0), patch=processor["patch_size"], merge=2, temporal_patch=2
    )


def official_patches(pixels: npt.NDArray[np.uint8], plan: ItemPlan, planner: GridPlanner) -> npt.NDArray[np.float32]:
    """[h * w, 3 * temporal_patch * patch * patch] of one image, as the processors order and normalise them."""
    image = pixels.reshape(plan.height, plan.width, 3).astype(np.float32)
    mean, std = np.array(planner.mean, np.float32), np.array(planner.std, np.float32)
    normalised = (image - mean * np.float32(255)) / (std * np.float32(255))
    _, rows, columns = plan.grid
    m, p, t = planner.merge, planner.patch, planner.temporal_patch
    tiles = normalised.reshape(rows // m, m, p, columns // m, m, p, 3)
    patches = tiles.transpose(0, 3, 1, 4, 6, 2, 5)  # merged row and column, inner row and column, channel, y, x
    frames = np.repeat(patches[:, :, :, :, :, None], t, axis=5)
    return frames.reshape(rows * columns, 3 * t * p * p)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "{processor} {size[0]}x{size[1]}".format(**case))
def test_bit_equal_to_the_official_processor(case: dict[str, Any]) -> None:
    planner = planner_of(case["processor"])
    height, width = case["size"]
    plan = planner.plan(ImageItem(height, width))
    assert list(plan.grid) == case["grid"]
    pixels = np.empty(plan.pixel_bytes, np.uint8)
    planner.fill_pixels(synthetic_image(height, width), plan, pixels)
    found = describe(official_patches(pixels, plan, planner))
    assert found["samples"] == case["samples"]
    assert found["sha256"] == case["sha256"]


def test_cases_cover_every_direction_of_resize() -> None:
    directions = set()
    for case in CASES:
        plan = planner_of(case["processor"]).plan(ImageItem(*case["size"]))
        height, width = case["size"]
        directions.add((np.sign(plan.height - height).item(), np.sign(plan.width - width).item()))
    assert directions >= {(0, 0), (1, 1), (-1, -1), (1, -1), (-1, 1)}
    assert len(CASES) >= 30
