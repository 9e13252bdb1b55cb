"""Patches of the official processors, turned back into the pixels they were made of; what is no such patches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from golden.make_pixels import synthetic_image
from opticnerve_server.models import registry
from opticnerve_server.models.base import ImageItem, PlanError
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.grid import GridPlanner
from opticnerve_server.models.patches import grid_of
from opticnerve_server.models.presets import PROCESSORS
from opticnerve_server.types import ItemPlan
from oracles import Media, media_for, official_patches
from photo_oracles import kimi_patches
from tiny_models import TINY

PRESETS = {
    "qwen3_vl": "qwen3-vl-2b",
    "qwen3_5": "qwen3.5-0.8b",
    "qwen2_5_vl": "qwen2.5-vl-3b",
    "glm4v": "glm-4.1v-9b",
    "ernie4_5_vl_moe": "ernie-4.5-vl-28b-a3b",
    "gemma4": "gemma-4-e2b",
}
GRIDS = [architecture for architecture in PRESETS if architecture != "gemma4"]
EXACT = ("qwen3_vl", "qwen3_5")
"""Their normalisation keeps pixel values apart in bfloat16, over all of its range."""


def planner_of(architecture: str) -> GridPlanner:
    planner = registry.build_planner(registry.open_model(f"preset:{PRESETS[architecture]}", "dummy"))
    assert isinstance(planner, GridPlanner)
    return planner


def patches_of(architecture: str, media: Media, directory: Path) -> npt.NDArray[np.float32]:
    """`pixel_values` of the official processor."""
    settings = {key: value for key, value in PROCESSORS[architecture].items() if key != "image_processor_type"}
    TINY[architecture].processor(**settings).save_pretrained(directory)
    return official_patches(architecture, directory, media).numpy()


def restored(planner: GridPlanner, patches: npt.NDArray[Any], kind: str, grid: Any) -> tuple[ItemPlan, Any]:
    """The plan and the frames [frames, height, width, 3]."""
    plan = planner.plan_patches(kind, tuple(grid), patches.shape)
    out = np.empty(plan.pixel_bytes, np.uint8)
    planner.fill_patches(patches, plan, out)
    return plan, out.reshape(-1, plan.height, plan.width, 3)


@pytest.mark.parametrize("architecture", GRIDS)
@pytest.mark.parametrize(("t", "odd"), [(1, False), (4, False), (4, True)])
def test_the_pixels_come_back(architecture: str, t: int, odd: bool, tmp_path: Path) -> None:
    planner = planner_of(architecture)
    media = media_for(architecture, t, 4, 6, seed=t, odd=odd)
    patches = patches_of(architecture, media, tmp_path)
    kind = "image" if t == 1 else "video"
    frames = media.frames
    if odd:
        frames = np.concatenate([frames, frames[-1:]])
    plan, wide = restored(planner, patches, kind, (t, 4, 6))
    assert (wide == frames).all()
    assert (plan.kind, plan.grid, plan.tokens, plan.merge) == (kind, (t, 4, 6), media.plan.tokens, 2)
    assert (plan.frame_indices, plan.timestamps) == ((), ())
    assert sum(span.rows for span in plan.spans) == plan.tokens
    _, narrow = restored(planner, patches.astype(ml_dtypes.bfloat16), kind, (t, 4, 6))
    difference = np.abs(narrow.astype(int) - frames)
    assert difference.max() <= (0 if architecture in EXACT else 1)
    assert difference[frames < 250].max() == 0
    mean, std = (255 * np.array(numbers)[:, None] for numbers in (planner.mean, planner.std))
    levels = np.rint(patches.reshape(len(patches), 3, -1) * std + mean)
    assert (restored(planner, levels.astype(np.uint8).reshape(patches.shape), kind, (t, 4, 6))[1] == frames).all()


def test_the_plan_of_a_still_is_that_of_the_image() -> None:
    planner = planner_of("qwen3_vl")
    image = planner.plan(ImageItem(320, 512))
    assert planner.plan_patches("image", (1, 20, 32), (640, 3 * 2 * 256)) == image


def test_the_pixels_come_back_from_patches_in_raster_order(tmp_path: Path) -> None:
    """Of Kimi-VL, whose images are padded with black."""
    write_checkpoint("kimi_vl", tmp_path)
    planner = registry.build_planner(registry.open_model(str(tmp_path), "safetensors"))
    assert isinstance(planner, GridPlanner)
    image = synthetic_image(100, 150)
    tensors = kimi_patches(tmp_path, image)
    grid = (1, *tensors["image_grid_hws"][0].tolist())
    for kind in (np.float32, ml_dtypes.bfloat16):
        plan, frames = restored(planner, tensors["pixel_values"].numpy().astype(kind), "image", grid)
        assert plan == planner.plan(ImageItem(100, 150))
        assert np.array_equal(frames[0, :100, :150], image)
        assert not frames[0, 100:].any()
        assert not frames[0, :, 150:].any()
    for other, match in (
        (("video", grid), "takes no videos"),
        (("image", (1, 512, 2)), "512 rows and 2 columns, the tower positions for 511"),
        (("image", (1, 3, 12)), "multiples of 2"),
        (("image", (1, 8, 10)), r"has \[80, 3, 14, 14\] for this model"),
    ):
        with pytest.raises(PlanError, match=match):
            planner.plan_patches(*other, tuple(tensors["pixel_values"].shape))


def numbered(planner: GridPlanner) -> npt.NDArray[np.float32]:
    """Good patches of a grid 1 x 2 x 4, all pixels 128."""
    shape = (8, 3 * planner.temporal_patch * planner.patch**2)
    return np.full(shape, (128 / 255 - 0.5) / 0.5, np.float32)


CHANGES = [
    (2.0, "not 8-bit pixels"),
    (1e38, "not 8-bit pixels"),
    (float("nan"), "NaN or infinity"),
    (float("inf"), "NaN or infinity"),
    (2 / 255, "frames of pixel_values differ"),
]
SMALL = [(0.003, "not 8-bit pixels"), (-0.0006, "not 8-bit pixels")]


@pytest.mark.parametrize(
    ("dtype", "change", "match"),
    [(np.float32, *case) for case in CHANGES + SMALL] + [(ml_dtypes.bfloat16, *case) for case in CHANGES],
)
def test_other_numbers_are_refused(dtype: Any, change: float, match: str) -> None:
    planner = planner_of("qwen3_vl")
    patches = numbered(planner)
    patches[5, 7] += np.float32(change)
    with pytest.raises(PlanError, match=match):
        restored(planner, patches.astype(dtype), "image", (1, 2, 4))


def test_resized_after_normalising_is_refused_in_bfloat16_too() -> None:
    planner = planner_of("qwen3_vl")
    smooth = np.random.default_rng(0).uniform(-1, 1, numbered(planner).shape)
    with pytest.raises(PlanError, match="not 8-bit pixels"):
        restored(planner, smooth.astype(ml_dtypes.bfloat16), "image", (1, 2, 4))


@pytest.mark.parametrize(
    ("architecture", "kind", "grid", "shape", "match"),
    [
        ("qwen3_vl", "image", (2, 2, 4), (16, 1536), "an image has one temporal group"),
        ("qwen3_vl", "image", (1, 3, 4), (12, 1536), "multiples of 2"),
        ("qwen3_vl", "image", (1, 0, 4), (0, 1536), "must be positive"),
        ("qwen3_vl", "image", (-1, -2, 4), (8, 1536), "must be positive"),
        ("qwen3_vl", "video", (1 << 40, 2, 4), (8, 1536), r"of shape \[8, 1536\], a grid of"),
        ("qwen3_vl", "image", (1, 2, 4), (8, 1176), r"has \[8, 1536\] for this model"),
        ("qwen3_vl", "image", (1, 2, 4), (1, 8, 1536), r"of shape \[1, 8, 1536\]"),
        ("ernie4_5_vl_moe", "video", (3, 2, 4), (24, 588), "a multiple of 2"),
        ("qwen3_vl", "image", (1, 6, 6), (1, 36, 1536), r"of shape \[1, 36, 1536\]"),
        ("gemma4", "image", (2, 3, 6), (2, 20, 768), "an image has one temporal group"),
        ("gemma4", "image", (1, 3, 4), (1, 20, 768), "multiples of 3"),
        ("gemma4", "image", (1, 3, 6), (18, 768), r"of shape \[18, 768\], a grid of 1 x 3 x 6 has \[1, 768, 768\]"),
        ("gemma4", "image", (1, 3, 6), (1, 17, 768), r"has \[1, 18, 768\] for this model"),
        ("gemma4", "image", (1, 3, 6), (1, 20, 588), r"has \[1, 20, 768\] for this model"),
        ("gemma4", "video", (3, 3, 6), (2, 20, 768), r"has \[3, 20, 768\] for this model"),
        ("gemma4", "image", (1, 3, 10242), (1, 30726, 768), "3 rows and 10242 columns, the tower positions for 10240"),
    ],
)
def test_other_grids_are_refused(architecture: str, kind: str, grid: Any, shape: Any, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        planner_of(architecture).plan_patches(kind, grid, shape)


def positioned(frames: npt.NDArray[np.uint8], dtype: Any) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Official patches and positions of each of these frames, padded to 70 tokens: a video's are those of stills."""
    processor = TINY["gemma4"].processor(max_soft_tokens=70)
    stills = processor(list(frames), do_resize=False, do_rescale=dtype != np.uint8, return_tensors="np")
    return stills.pixel_values.astype(dtype), stills.image_position_ids


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.uint8])
@pytest.mark.parametrize(("kind", "t"), [("image", 1), ("video", 1), ("video", 3)])
def test_the_pixels_come_back_from_positions(kind: str, t: int, dtype: Any) -> None:
    frames = np.random.default_rng(t).integers(0, 256, (t, 96, 144, 3), dtype=np.uint8)
    frames[0].flat[:256] = np.arange(256)
    patches, positions = positioned(frames, dtype)
    assert patches.shape == (t, 630, 768)
    grid = grid_of(positions)
    assert grid == (t, 6, 9)
    planner = planner_of("gemma4")
    patches[:, 54:] = 99  # padding is not looked at
    plan, out = restored(planner, patches, kind, grid)
    assert (out == frames).all()
    assert (plan.kind, plan.grid, plan.tokens, len(plan.spans), plan.timestamps) == (kind, grid, 6 * t, t, ())
    if kind == "image":
        assert plan == planner._still(96, 144)


def test_every_level_comes_back_in_bfloat16() -> None:
    """On every channel, which share one range without a normalisation."""
    frames = np.arange(256, dtype=np.uint8).repeat(3 * 9).reshape(1, 48, 48, 3)
    patches, positions = positioned(frames, ml_dtypes.bfloat16)
    assert (restored(planner_of("gemma4"), patches, "image", grid_of(positions))[1] == frames).all()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("value", "match"),
    [
        (float("nan"), "NaN or infinity"),
        (float("-inf"), "NaN or infinity"),
        (1.5 / 255, "not 8-bit pixels"),
        (1.02, "not 8-bit pixels"),
        (-1.0, "not 8-bit pixels"),
    ],
)
def test_other_numbers_are_refused_in_patches_with_positions(dtype: Any, value: float, match: str) -> None:
    patches, positions = positioned(np.zeros((2, 48, 96, 3), np.uint8), dtype)
    patches[1, 17, 700] = value
    with pytest.raises(PlanError, match=match):
        restored(planner_of("gemma4"), patches, "video", grid_of(positions))


@pytest.mark.parametrize(
    ("at", "value"),
    [
        ((0, 0), (1, 0)),  # twice the same one
        ((0, 5), (-1, -1)),  # padding inside
        ((0, 17), (-1, -1)),  # the last one missing
        ((0, 18), (0, 3)),  # more than a raster
        ((0, 19), (-1, 0)),
        ((0, 19), (-2, -2)),
        ((0, 17), (2**63 - 1, 2**63 - 1)),
        ((1, 3), (5, 1)),  # another frame than the first
        ((0, slice(None)), (-1, -1)),  # nothing at all
        ((slice(None), slice(18)), [(n // 3, n % 3) for n in range(18)]),  # column by column
    ],
)
def test_positions_of_no_raster_are_refused(at: Any, value: Any) -> None:
    _, positions = positioned(np.zeros((2, 48, 96, 3), np.uint8), np.uint8)
    assert grid_of(positions) == (2, 3, 6)
    positions[at] = value
    with pytest.raises(PlanError, match=r"not \(column, row\) of a whole raster"):
        grid_of(positions)
