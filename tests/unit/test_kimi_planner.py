"""The planner of Kimi-VL against the steps of the authors' image processor, taken with Pillow."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from golden.make_pixels import synthetic_image
from image_sizes import sizes
from opticnerve_server.models import registry
from opticnerve_server.models.base import ImageItem, PlanError, VideoItem
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.grid import PATH, GridPlanner
from opticnerve_server.models.presets import PROCESSORS
from opticnerve_server.models.registry import ModelError
from opticnerve_server.types import PathPlan, Span


@pytest.fixture
def planner_of(tmp_path: Path) -> Any:
    def build(**changes: Any) -> GridPlanner:
        write_checkpoint("kimi_vl", tmp_path)
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**PROCESSORS["kimi_vl"], **changes}))
        planner = registry.build_planner(registry.open_model(str(tmp_path), "safetensors"))
        assert isinstance(planner, GridPlanner)
        return planner

    return build


def scaled(width: int, height: int, limit: int) -> tuple[int, int]:
    """Width and height of an image before it is padded."""
    patches = (width // 14) * (height // 14)
    if patches > limit:
        scale = math.sqrt(limit / patches)
        width, height = int(width * scale), int(height * scale)
    return width, height


def padded(side: int) -> int:
    return side + (28 - side % 28) % 28


@pytest.mark.parametrize("limit", [4096, 16384, 100])
def test_sizes_and_refusals_of_the_authors_processor(limit: int, planner_of: Any) -> None:
    planner = planner_of(in_token_limit=limit)
    edges = [
        (14 * rows + more, 14 * columns) for rows in (63, 64, 65) for columns in (63, 64, 65) for more in (-1, 0, 13)
    ]
    strips = [(14 * rows, 14 * columns - 1) for rows in (1, 2, 8, 9) for columns in (509, 510, 511, 512, 513, 600)]
    checked = refused = 0
    for height, width in [*sizes(28), *edges, *strips, *[(width, height) for height, width in strips]]:
        checked += 1
        wide, high = (padded(side) for side in scaled(width, height, limit))
        if wide // 14 >= 512 or high // 14 >= 512:
            refused += 1
            with pytest.raises(PlanError, match=f"{height} x {width} pixels .* fewer than 512 a side"):
                planner.plan(ImageItem(height, width))
            continue
        plan = planner.plan(ImageItem(height, width))
        assert (plan.height, plan.width) == (high, wide)
        assert plan.grid == (1, high // 14, wide // 14)
        assert plan.tokens == (high // 28) * (wide // 28)
        assert plan.paths == {PATH: PathPlan(plan.tokens, 1, 4 * plan.tokens, high * wide * 3)}
        assert plan.spans == (Span("image", plan.tokens),)
        assert plan.tokens <= planner.paths[PATH].max_units
    assert checked >= 2000
    assert refused >= 5


@pytest.mark.parametrize("limit", [1, 2, 7, 64, 100, 1000, 4096, 16384])
def test_no_image_has_more_tokens_than_the_path_says(limit: int, planner_of: Any) -> None:
    planner, most = planner_of(in_token_limit=limit), 0
    random = np.random.default_rng(limit)
    shapes = np.exp2(random.uniform(0, 14, (3000, 2))).astype(int).tolist()
    shapes += [(14 * i + 13, 14 * max(1, limit // i) + 13) for i in range(1, 520, 3)]
    for height, width in shapes:
        try:
            most = max(most, planner.plan(ImageItem(height, width)).tokens)
        except PlanError:
            continue
    assert most <= planner.paths[PATH].max_units


def test_pixels_are_those_of_pillow_then_black(planner_of: Any) -> None:
    planner = planner_of(in_token_limit=100)
    for height, width in [(1, 1), (28, 56), (30, 57), (140, 140), (300, 200), (90, 700), (13, 13)]:
        image = synthetic_image(height, width)
        plan = planner.plan(ImageItem(height, width))
        size = scaled(width, height, 100)
        expected = np.zeros((plan.height, plan.width, 3), np.uint8)
        picture = Image.fromarray(image)
        if size != (width, height):
            picture = picture.resize(size, Image.Resampling.BICUBIC)
        expected[: size[1], : size[0]] = np.asarray(picture)
        found = np.full(plan.pixel_bytes, 255, np.uint8)
        planner.fill_pixels(image, plan, found)
        assert np.array_equal(found.reshape(expected.shape), expected), (height, width)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pad_input", False),
        ("in_token_limit", 0),
        ("patch_size", 16),
        ("merge_kernel_size", [1, 1]),
        ("image_processor_type", "Qwen2VLImageProcessor"),
        ("max_pixels", 3136),
    ],
)
def test_settings_that_are_refused_by_name(key: str, value: object, planner_of: Any) -> None:
    with pytest.raises(ModelError, match=f"{key} is "):
        planner_of(**{key: value})


def test_videos_are_refused(planner_of: Any) -> None:
    planner = planner_of()
    assert planner.modalities == ("image",)
    with pytest.raises(PlanError, match="send images"):
        planner.plan(VideoItem(8, 2.0, 100, 100))
