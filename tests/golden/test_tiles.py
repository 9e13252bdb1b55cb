"""The tiles of Llama 4 against what the official processor made of the same sizes and images; see make_tiles.py."""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
import pytest
import torch

from golden.make_pixels import synthetic_image
from golden.make_tiles import FILE, PICTURES, SETTINGS, SIDE, all_sizes
from opticnerve_server.models import registry
from opticnerve_server.models.base import ImageItem
from opticnerve_server.models.presets import PRESETS, PROCESSORS
from opticnerve_server.models.tile_tower import BFloat16Patches
from opticnerve_server.models.tiles import TilePlanner
from opticnerve_server.types import Span

RECORDED: dict[str, Any] = json.loads(FILE.read_text())
TOKENS = 144


def planner_of(**changes: Any) -> TilePlanner:
    settings = {**PROCESSORS["llama4"], **changes}
    source = registry.ModelSource("test", "llama4", PRESETS["llama-4-scout"], settings, None)
    planner = registry.build_planner(source)
    assert isinstance(planner, TilePlanner)
    return planner


@pytest.mark.parametrize("index", range(len(SETTINGS)))
def test_canvas_and_size_for_every_size(index: int) -> None:
    planner, images = planner_of(**SETTINGS[index]), all_sizes(SETTINGS[index])
    assert len(images) >= (300 if SETTINGS[index] else 2000)
    for (height, width), (rows, columns, *resized) in zip(images, RECORDED["tilings"][index], strict=True):
        tiled, *overview = planner.rule(height, width)
        assert [tiled.rows, tiled.columns, *(tiled.resized or ())] == [rows, columns, *resized], (height, width)
        assert [view.overview for view in overview] == [True] * (rows * columns > 1)
        plan = planner.plan(ImageItem(height, width))
        tiles = rows * columns + len(overview)
        assert (plan.tokens, plan.grid) == (tiles * TOKENS, (1, rows * 24, columns * 24))
        assert (plan.paths["default"].units, plan.pixel_bytes) == (tiles, tiles * SIDE**2 * 3)
        if tiles > 1:
            places = [(row, column) for row in range(rows) for column in range(columns)]
            assert plan.spans == (*(Span("tile", TOKENS, *place) for place in places), Span("global", TOKENS))
        else:
            assert plan.spans == (Span("image", TOKENS),)


@pytest.mark.parametrize(("height", "width"), PICTURES)
def test_normalised_tiles_are_bit_equal(height: int, width: int) -> None:
    planner = planner_of()
    plan = planner.plan(ImageItem(height, width))
    pixels = np.empty(plan.pixel_bytes, np.uint8)
    planner.fill_pixels(synthetic_image(height, width), plan, pixels)
    tiles = torch.from_numpy(pixels).view(-1, SIDE, SIDE, 3)
    normalised = BFloat16Patches(planner, torch.device("cpu")).normalised(tiles).permute(0, 3, 1, 2)
    found = zlib.crc32(normalised.contiguous().view(torch.int16).numpy().tobytes())
    assert found == RECORDED["pixels"][PICTURES.index((height, width))]
