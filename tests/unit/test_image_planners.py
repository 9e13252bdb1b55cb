"""Planners of grids against their official image processors: sizes, refusals, pixels, settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from transformers.models.ernie4_5_vl_moe import image_processing_pil_ernie4_5_vl_moe as ernie
from transformers.models.gemma4 import image_processing_pil_gemma4 as gemma4
from transformers.models.glm4v import image_processing_pil_glm4v as glm4v
from transformers.models.glm46v import image_processing_pil_glm46v as glm46v
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen2_vl

from golden.make_pixels import synthetic_image
from image_sizes import sizes
from opticnerve_server.models import registry
from opticnerve_server.models.base import ImageItem, PlanError
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.grid import PATH, GridPlanner
from opticnerve_server.models.presets import PROCESSORS
from opticnerve_server.models.registry import ModelError
from opticnerve_server.types import PathPlan, Span
from tiny_models import GRIDS, TINY

SMART_RESIZE = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), qwen2_vl),
    **dict.fromkeys(("glm4v", "glm4v_moe"), glm4v),
    "glm46v": glm46v,
    "ernie4_5_vl_moe": ernie,
}
OFFICIAL = [name for name in GRIDS if TINY[name].processor is not None]
ONE_OF_EACH = ("qwen2_vl", "qwen3_5", "glm4v", "glm46v", "ernie4_5_vl_moe", "gemma4")


def official_of(architecture: str, **changes: Any) -> Any:
    settings = {key: value for key, value in PROCESSORS[architecture].items() if key != "image_processor_type"}
    return TINY[architecture].processor(**{**settings, **changes})


def official_size(architecture: str, official: Any, height: int, width: int) -> tuple[int, int]:
    """Raises ValueError for a size that is refused."""
    if architecture == "gemma4":
        patches = official.max_soft_tokens * official.pooling_kernel_size**2
        return gemma4.get_aspect_ratio_preserving_size(
            height, width, official.patch_size, patches, official.pooling_kernel_size
        )
    limits = {"min_pixels": official.size["shortest_edge"], "max_pixels": official.size["longest_edge"]}
    factor = official.patch_size * official.merge_size
    if architecture.startswith("glm"):
        limits |= {"num_frames": official.temporal_patch_size, "temporal_factor": official.temporal_patch_size}
    return SMART_RESIZE[architecture].smart_resize(height=height, width=width, factor=factor, **limits)


@pytest.fixture
def planner_of(tmp_path: Path) -> Any:
    def build(architecture: str, **changes: Any) -> GridPlanner:
        if not (tmp_path / "config.json").exists():
            write_checkpoint(architecture, tmp_path)
        settings = json.dumps({**PROCESSORS[architecture], **changes})
        (tmp_path / "preprocessor_config.json").write_text(settings)
        planner = registry.build_planner(registry.open_model(str(tmp_path), "safetensors"))
        assert isinstance(planner, GridPlanner)
        return planner

    return build


@pytest.mark.parametrize("architecture", OFFICIAL)
def test_sizes_and_refusals_of_the_official_processor(architecture: str, planner_of: Any) -> None:
    planner, official = planner_of(architecture), official_of(architecture)
    side = planner.patch * planner.merge
    checked = refused = 0
    for height, width in sizes(side):
        checked += 1
        try:
            expected = official_size(architecture, official, height, width)
        except ValueError:
            refused += 1
            with pytest.raises(PlanError, match=f"{height} x {width} pixels .* at most 200"):
                planner.plan(ImageItem(height, width))
            continue
        plan = planner.plan(ImageItem(height, width))
        assert (plan.height, plan.width) == expected
        assert plan.grid == (1, plan.height // planner.patch, plan.width // planner.patch)
        patches = plan.grid[1] * plan.grid[2]
        assert plan.tokens == patches // planner.merge**2 == plan.height * plan.width // side**2
        assert plan.paths == {PATH: PathPlan(plan.tokens, 1, patches, plan.height * plan.width * 3)}
        assert plan.spans == (Span("image", plan.tokens),)
        assert plan.tokens <= planner.paths[PATH].max_units
    assert checked >= 2000
    assert (refused >= 100) == (architecture != "gemma4")


@pytest.mark.parametrize("tokens", [70, 140, 560])
def test_every_number_of_soft_tokens(tokens: int, planner_of: Any) -> None:
    planner, official = planner_of("gemma4", max_soft_tokens=tokens), official_of("gemma4", max_soft_tokens=tokens)
    for height, width in sizes(48):
        plan = planner.plan(ImageItem(height, width))
        assert (plan.height, plan.width) == official_size("gemma4", official, height, width)
        assert plan.tokens <= tokens


def images_of(architecture: str, output: Any, grid: tuple[int, int, int], planner: GridPlanner) -> npt.NDArray[Any]:
    """Official patches of one image back in levels 0..255, [height, width, 3]."""
    (_, rows, columns), m, p = grid, planner.merge, planner.patch
    if architecture == "gemma4":
        patches = output.pixel_values[0][: rows * columns].reshape(rows, columns, p, p, 3)
        return patches.transpose(0, 2, 1, 3, 4).reshape(rows * p, columns * p, 3) * np.float32(255)
    tiles = output.pixel_values.reshape(rows // m, columns // m, m, m, 3, planner.temporal_patch, p, p)
    image = tiles[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * p, columns * p, 3)
    return (image * np.array(planner.std, np.float32) + np.array(planner.mean, np.float32)) * 255


@pytest.mark.parametrize("architecture", ONE_OF_EACH)
def test_whole_runs_of_the_official_processor(architecture: str, planner_of: Any) -> None:
    planner, official = planner_of(architecture), official_of(architecture)
    for height, width in [
        (1, 1),
        (28, 200),
        (480, 640),
        (13, 300),
        *np.random.default_rng(7).integers(8, 400, (4, 2)).tolist(),
    ]:
        plan = planner.plan(ImageItem(height, width))
        image = synthetic_image(height, width) // 2 + 64  # no overshoot, which torch and Pillow clip differently
        output = official(image, input_data_format="channels_last", return_tensors="np")
        if architecture == "gemma4":
            assert output.num_soft_tokens_per_image.tolist() == [plan.tokens]
        else:
            assert output.image_grid_thw.tolist() == [list(plan.grid)]
        pixels = np.empty(plan.pixel_bytes, np.uint8)
        planner.fill_pixels(image, plan, pixels)
        expected = images_of(architecture, output, plan.grid, planner)
        difference = np.abs(pixels.reshape(plan.height, plan.width, 3) - expected).round()
        assert difference.max() <= 2
        assert (difference > 1).mean() <= 1e-3


@pytest.mark.parametrize("architecture", ONE_OF_EACH)
def test_files_that_transformers_saves(architecture: str, planner_of: Any, tmp_path: Path) -> None:
    planner = planner_of(architecture)
    official_of(architecture).save_pretrained(tmp_path)
    saved = registry.build_planner(registry.open_model(str(tmp_path), "safetensors"))
    for size in ((1, 1), (480, 640), (3000, 4000)):
        assert saved.plan(ImageItem(*size)) == planner.plan(ImageItem(*size))


@pytest.mark.parametrize("architecture", ["glm4v", "glm46v", "ernie4_5_vl_moe", "gemma4"])
def test_an_empty_file_means_the_class_defaults(architecture: str, planner_of: Any) -> None:
    planner, official = (
        planner_of(architecture, **dict.fromkeys(PROCESSORS[architecture])),
        TINY[architecture].processor(),
    )
    for size in ((30, 30), (480, 640), (5000, 7000)):
        plan = planner.plan(ImageItem(*size))
        assert (plan.height, plan.width) == official_size(architecture, official, *size)
    assert (planner.mean, planner.std) == (tuple(official.image_mean), tuple(official.image_std))


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("glm4v", "image_processor_type", "Qwen2VLImageProcessor"),
        ("glm4v", "min_pixels", 3136),
        ("glm4v", "temporal_patch_size", 1),
        ("ernie4_5_vl_moe", "temporal_patch_size", 2),
        ("ernie4_5_vl_moe", "max_pixels", 3136),
        ("ernie4_5_vl_moe", "image_processor_type", "Ernie_45T_VLImageProcessor"),
        ("gemma4", "max_soft_tokens", 100),
        ("gemma4", "max_soft_tokens", 1120),  # more than the positions of this small tower
        ("gemma4", "pooling_kernel_size", 2),
        ("gemma4", "patch_size", 14),
        ("gemma4", "do_rescale", False),
        ("gemma4", "merge_size", 2),
        ("gemma4", "size", {"height": 896, "width": 896}),
    ],
)
def test_settings_that_are_refused_by_name(architecture: str, key: str, value: object, planner_of: Any) -> None:
    with pytest.raises(ModelError, match=f"{key} is "):
        planner_of(architecture, **{key: value})


def test_only_an_identity_normalises_for_gemma4(planner_of: Any) -> None:
    planner_of("gemma4", do_normalize=True)
    with pytest.raises(ModelError, match=r"image_mean is .* never normalised"):
        planner_of("gemma4", do_normalize=True, image_mean=[0.5] * 3)
