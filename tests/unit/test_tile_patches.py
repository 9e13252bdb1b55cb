"""Tiles of the official processors, turned back into the pixels they were made of; what is no such tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from golden.make_pixels import synthetic_image
from opticnerve_server.models import registry
from opticnerve_server.models.base import ImageItem, PlanError
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.presets import PROCESSORS
from opticnerve_server.models.tile_tower import BFloat16Patches, TilePatches
from opticnerve_server.models.tiles import TilePlanner
from opticnerve_server.types import ItemPlan, Span
from photo_oracles import internvl_grid, llama4_tiles, torchvision_resize
from tiny_models import TILES, TINY

GRIDS = {"gemma3": (1, 4), "internvl": (3, 4), "internvl_chat": (3, 4), "llama4": (3, 5)}
"""Rows and columns of tiles that each small model has of some image."""


PAN_AND_SCAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


@pytest.fixture
def planner_of(tmp_path: Path) -> Any:
    """The planner of a small checkpoint; that of Gemma 3 pans and scans."""

    def build(architecture: str) -> TilePlanner:
        write_checkpoint(architecture, tmp_path)
        source = registry.open_model(str(tmp_path), "safetensors")
        if architecture == "gemma3":
            source.processor["do_pan_and_scan"] = True
        planner = registry.build_planner(source)
        assert isinstance(planner, TilePlanner)
        return planner

    return build


def restored(planner: TilePlanner, patches: npt.NDArray[Any], kind: str, grid: Any) -> tuple[ItemPlan, Any]:
    """The plan, and the tiles [tiles, side, side, 3]."""
    plan = planner.plan_patches(kind, tuple(grid), patches.shape)
    out = np.empty(plan.pixel_bytes, np.uint8)
    planner.fill_patches(patches, plan, out)
    return plan, out.reshape(-1, planner.side, planner.side, 3)


@pytest.mark.parametrize(("height", "width"), [(300, 1300), (900, 280), (480, 640), (60, 60)])
@pytest.mark.parametrize("architecture", ["gemma3", "internvl"])
def test_plan_and_pixels_are_those_of_the_image(architecture: str, height: int, width: int, planner_of: Any) -> None:
    """Of what an official processor returns, and the rows and columns that its caller adds."""
    planner, image = planner_of(architecture), synthetic_image(height, width)
    plan = planner.plan(ImageItem(height, width))
    expected = np.empty(plan.pixel_bytes, np.uint8)
    planner.fill_pixels(image, plan, expected)
    settings = {**PROCESSORS[architecture], **(PAN_AND_SCAN if architecture == "gemma3" else {})}
    settings |= {"size": {"height": planner.side, "width": planner.side}}
    settings.pop("image_processor_type")
    with torchvision_resize():
        official = TINY[architecture].processor(**settings)
        output = official(image, input_data_format="channels_last", return_tensors="np")
    if architecture == "internvl":
        rows, columns = internvl_grid(image, planner.side, 1, 12)[0].tolist()
    else:
        crops = max(1, int(output.num_crops[0]))
        rows, columns = (1, crops) if width >= height else (crops, 1)
    found = restored(planner, output.pixel_values, "image", (1, rows, columns))
    assert found[0] == plan
    assert np.array_equal(found[1].ravel(), expected)


def test_pixels_of_llama4_come_back_from_bfloat16(planner_of: Any) -> None:
    planner, image = planner_of("llama4"), synthetic_image(640, 1000)
    tensors = llama4_tiles(Path(), image)
    grid = (1, *tensors["aspect_ratios"][0].tolist())
    plan = planner.plan(ImageItem(640, 1000))
    expected = np.empty(plan.pixel_bytes, np.uint8)
    planner.fill_pixels(image, plan, expected)
    wide = tensors["pixel_values"].float().numpy()
    for patches in (wide, wide.astype(ml_dtypes.bfloat16)):
        found = restored(planner, patches, "image", grid)
        assert found[0] == plan
        assert np.array_equal(found[1].ravel(), expected)


@pytest.mark.parametrize("architecture", TILES)
def test_every_level_of_every_channel_comes_back_as_the_tower_normalises_it(architecture: str, planner_of: Any) -> None:
    planner = planner_of(architecture)
    tiles = np.resize(np.arange(256, dtype=np.uint8).repeat(3), (1, planner.side, planner.side, 3))
    kind = BFloat16Patches if architecture == "llama4" else TilePatches
    normalised = kind(planner, torch.device("cpu")).normalised(torch.from_numpy(tiles)).float().numpy()
    for patches in (normalised, tiles):
        _, found = restored(planner, patches.transpose(0, 3, 1, 2), "image", (1, 1, 1))
        assert np.array_equal(found, tiles)


@pytest.mark.parametrize("architecture", TILES)
def test_spans_have_the_places_that_the_caller_names(architecture: str, planner_of: Any) -> None:
    planner, (rows, columns) = planner_of(architecture), GRIDS[architecture]
    tokens, count = planner.paths["default"].tokens_per_unit, rows * columns + 1
    plan = planner.plan_patches("image", (1, rows, columns), (count, 3, planner.side, planner.side))
    tiles = [Span("tile", tokens, row, column) for row in range(rows) for column in range(columns)]
    overview = Span("global", tokens)
    assert plan.spans == ((overview, *tiles) if architecture == "gemma3" else (*tiles, overview))
    assert plan.tokens == count * tokens


def test_a_video_is_a_tile_a_frame(planner_of: Any) -> None:
    planner = planner_of("internvl")
    frames = np.random.default_rng(0).integers(0, 256, (5, planner.side, planner.side, 3), dtype=np.uint8)
    patches = ((frames / 255 - planner.mean) / planner.std).astype(np.float32).transpose(0, 3, 1, 2)[None]
    plan, found = restored(planner, patches, "video", (5, 1, 1))
    assert np.array_equal(found, frames)
    assert (plan.kind, plan.grid, plan.tokens) == ("video", (5, 4, 4), 20)
    assert plan.spans == (Span("frame", 4),) * 5
    assert (plan.frame_indices, plan.timestamps) == ((), ())


@pytest.mark.parametrize(
    ("architecture", "kind", "grid", "shape", "match"),
    [
        ("internvl", "image", (1, 2, 3), (6, 3, 56, 56), r"of shape \[6, 3, 56, 56\], 7 of them have \[7, 3, 56, 56\]"),
        ("internvl", "image", (1, 2, 3), (7, 3, 448, 448), r"7 of them have \[7, 3, 56, 56\]"),
        ("internvl", "image", (1, 2, 3), (1, 7, 3, 56, 56), r"of shape \[1, 7, 3, 56, 56\]"),
        ("internvl", "image", (1, 3, 5), (16, 3, 56, 56), "no image has 3 x 5 tiles"),
        ("internvl", "image", (1, 1 << 40, 1 << 40), (16, 3, 56, 56), "no image has"),
        ("internvl", "image", (2, 1, 1), (2, 3, 56, 56), "an image has one frame"),
        ("internvl", "image", (1, 0, 2), (1, 3, 56, 56), "must be positive"),
        ("internvl", "image", (1, -1, -2), (3, 3, 56, 56), "must be positive"),
        ("internvl", "video", (4, 2, 2), (1, 16, 3, 56, 56), "a frame of a video one tile"),
        ("internvl", "video", (1 << 40, 1, 1), (1, 4, 3, 56, 56), r"of shape \[1, 4, 3, 56, 56\]"),
        ("llama4", "image", (1, 1, 17), (18, 3, 56, 56), "no image has 1 x 17 tiles"),
        ("llama4", "video", (2, 1, 1), (1, 2, 3, 56, 56), "takes no videos: send their frames as images"),
        ("gemma3", "video", (2, 1, 1), (1, 2, 3, 112, 112), "takes no videos: send their frames as images"),
        ("gemma3", "image", (1, 1, 5), (6, 3, 112, 112), "no image has 1 x 5 tiles"),
        ("gemma3", "image", (1, 2, 2), (5, 3, 112, 112), "no image has 2 x 2 tiles"),
    ],
)
def test_other_tiles_are_refused(
    architecture: str, kind: str, grid: Any, shape: Any, match: str, planner_of: Any
) -> None:
    with pytest.raises(PlanError, match=match):
        planner_of(architecture).plan_patches(kind, grid, shape)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1.1, -1.1, 0.003, 1e38])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_other_numbers_are_refused_of_llama4(dtype: Any, value: float, planner_of: Any) -> None:
    """All that is none of the 256 numbers of a channel; 0.003 is between two."""
    patches = np.full((1, 3, 56, 56), -1, dtype)
    patches[0, 2, 55, 55] = value
    with pytest.raises(PlanError, match="not 8-bit pixels under this model's normalisation"):
        restored(planner_of("llama4"), patches, "image", (1, 1, 1))


@pytest.mark.parametrize(("value", "match"), [(float("nan"), "NaN or infinity"), (0.003, "not 8-bit pixels")])
def test_other_numbers_are_refused_of_float32_models(value: float, match: str, planner_of: Any) -> None:
    patches = np.full((1, 3, 112, 112), -1, np.float32)
    patches[0, 2, 111, 111] = value
    with pytest.raises(PlanError, match=match):
        restored(planner_of("gemma3"), patches, "image", (1, 1, 1))
