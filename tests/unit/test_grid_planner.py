"""The grid planner against the official processors: sizes and refusals by the thousand, pixels near Pillow's."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from transformers import Qwen2VLImageProcessorPil

from golden.make_pixels import PROCESSORS, synthetic_image
from image_sizes import sizes
from opticnerve_server.models.base import ImageItem, PathSpec, PlanError, Planner
from opticnerve_server.models.grid import PATH, ClipResize, GridPlanner, StillResize
from opticnerve_server.types import Layout, PathPlan, Span

FAMILIES = ["qwen3_vl", "qwen2_5_vl"]


def planner_of(name: str) -> GridPlanner:
    processor = PROCESSORS[name]
    return GridPlanner.from_processor(
        processor, architecture=name, layout=Layout(8, 0), patch=processor["patch_size"], merge=2, temporal_patch=2
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_grid_and_refusals_of_the_official_processor(family: str) -> None:
    planner, official = planner_of(family), Qwen2VLImageProcessorPil(**PROCESSORS[family])
    checked = refused = 0
    for height, width in sizes(planner.patch * planner.merge):
        checked += 1
        try:
            patches = official.get_number_of_image_patches(height, width)
        except ValueError:
            refused += 1
            with pytest.raises(PlanError, match=f"{height} x {width} pixels .* at most 200"):
                planner.plan(ImageItem(height, width))
            continue
        plan = planner.plan(ImageItem(height, width))
        t, rows, columns = plan.grid
        assert (t, rows * columns) == (1, patches)
        assert plan.tokens * planner.merge**2 == patches
        assert (plan.height, plan.width) == (rows * planner.patch, columns * planner.patch)
        assert plan.paths == {PATH: PathPlan(plan.tokens, 1, patches, plan.height * plan.width * 3)}
        assert plan.spans == (Span("image", plan.tokens),)
        assert plan.tokens <= planner.paths[PATH].max_units
    assert checked >= 2000
    assert refused >= 100


# Sides that keep a run of the whole processor short.
RUNS = [(name, *size) for name in FAMILIES for size in np.random.default_rng(7).integers(1, 400, (20, 2)).tolist()]
RUNS += [("narrow", *size) for size in np.random.default_rng(8).integers(10, 900, (10, 2)).tolist()]


@pytest.mark.parametrize(("name", "height", "width"), RUNS)
def test_whole_runs_of_the_official_processor(name: str, height: int, width: int) -> None:
    planner, official = planner_of(name), Qwen2VLImageProcessorPil(**PROCESSORS[name])
    plan = planner.plan(ImageItem(height, width))
    full_range = synthetic_image(height, width)
    for image in (full_range, full_range // 2 + 64):
        output = official(image, input_data_format="channels_last", return_tensors="np")
        assert output.image_grid_thw.tolist() == [list(plan.grid)]
        assert len(output.pixel_values) == plan.tokens * planner.merge**2

        pixels = np.empty(plan.pixel_bytes, np.uint8)
        planner.fill_pixels(image, plan, pixels)
        resized = pixels.reshape(plan.height, plan.width, 3)
        difference = np.abs(resized - levels(output.pixel_values, planner, plan.grid)).round()
        if image is full_range and plan.height < height:  # torch and Pillow clip overshoot in another order of the axes
            assert difference.max() <= 12
        else:
            assert difference.max() <= 2
            assert (difference > 1).mean() <= 1e-4


def levels(
    patches: npt.NDArray[np.float32], planner: GridPlanner, grid: tuple[int, int, int]
) -> npt.NDArray[np.float32]:
    """Official patches back to an image [height, width, 3] in levels 0..255."""
    _, rows, columns = grid
    m, p = planner.merge, planner.patch
    tiles = patches.reshape(rows // m, columns // m, m, m, 3, planner.temporal_patch, p, p)[:, :, :, :, :, 0]
    image = tiles.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * p, columns * p, 3)
    return (image * np.array(planner.std, np.float32) + np.array(planner.mean, np.float32)) * 255


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0), (-1, 4)])
def test_no_pixels(size: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match="at least 1"):
        planner_of("qwen3_vl").plan(ImageItem(*size))


def test_an_image_of_its_final_size_is_copied() -> None:
    planner = planner_of("qwen2_5_vl")
    image = synthetic_image(84, 112)
    plan = planner.plan(ImageItem(84, 112))
    out = np.zeros(plan.pixel_bytes, np.uint8)
    planner.fill_pixels(image, plan, out)
    np.testing.assert_array_equal(out, image.ravel())


def test_fill_pixels_writes_its_slot_alone() -> None:
    planner = planner_of("qwen2_5_vl")
    image = synthetic_image(90, 61)
    image.setflags(write=False)
    plan = planner.plan(ImageItem(90, 61))
    arena = np.full(plan.pixel_bytes + 200, 7, np.uint8)
    planner.fill_pixels(image, plan, arena[100:-100])
    alone = np.empty(plan.pixel_bytes, np.uint8)
    planner.fill_pixels(image, plan, alone)
    np.testing.assert_array_equal(arena[100:-100], alone)
    assert set(arena[:100]) | set(arena[-100:]) == {7}
    reversed_memory = np.asfortranarray(image)
    planner.fill_pixels(reversed_memory, plan, arena[100:-100])
    np.testing.assert_array_equal(arena[100:-100], alone)


@pytest.mark.parametrize("size", [-1, 1])
def test_fill_pixels_refuses_another_size_of_slot(size: int) -> None:
    planner = planner_of("qwen2_5_vl")
    plan = planner.plan(ImageItem(90, 61))
    with pytest.raises(ValueError, match="reshape"):
        planner.fill_pixels(synthetic_image(90, 61), plan, np.empty(plan.pixel_bytes + size, np.uint8))


def test_paths() -> None:
    planner: Planner = planner_of("qwen3_vl")
    assert planner.paths == {PATH: PathSpec(min_units=64, max_units=16384, rows_per_unit=4)}
    assert planner_of("qwen2_5_vl").paths[PATH].max_units == 16384


@pytest.mark.parametrize(
    ("min_pixels", "max_pixels"), [(1, 1), (1, 3000), (784, 20_000), (50_000, 50_000), (784, 10**5)]
)
@pytest.mark.parametrize("rule", [StillResize, ClipResize])
def test_no_item_exceeds_the_declared_most(rule: Any, min_pixels: int, max_pixels: int) -> None:
    """Near the refused aspects, sides are rounded up beyond limits as narrow as these."""
    planner = GridPlanner(
        architecture="a", layout=Layout(8, 0), patch=14, merge=2, temporal_patch=2, mean=(0.5,) * 3, std=(0.5,) * 3,
        resize=rule(factor=28, min_pixels=min_pixels, max_pixels=max_pixels),
    )  # fmt: skip
    strips = [(side, math.floor(side * aspect)) for side in range(1, 200) for aspect in (1, 1.4, 20, 150, 199, 200)]
    most = max(planner.plan(ImageItem(*size)).tokens for size in strips)
    assert most <= planner.paths[PATH].max_units <= max(most * 2, most + 16)


@pytest.mark.parametrize(
    ("field", "value"), [("patch", 0), ("merge", 0), ("temporal_patch", 0), ("fold", 0), ("std", (0.5, 0.0, 0.5))]
)
def test_numbers_that_make_no_sense(field: str, value: object) -> None:
    numbers = {"patch": 14, "merge": 2, "temporal_patch": 2}
    rule = StillResize(factor=28, min_pixels=10, max_pixels=1000)
    arguments = {**numbers, "resize": rule, "mean": (0.5,) * 3, "std": (0.5,) * 3, field: value}
    with pytest.raises(ValueError, match=field):
        GridPlanner(architecture="a", layout=Layout(8, 0), **arguments)  # type: ignore[arg-type]


def test_planning_loads_no_torch() -> None:
    code = """
import sys
from opticnerve_server.models.base import ImageItem
from opticnerve_server.models.grid import GridPlanner, StillResize
from opticnerve_server.types import Layout
rule = StillResize(factor=32, min_pixels=65536, max_pixels=16777216)
planner = GridPlanner(architecture="a", layout=Layout(8, 0), patch=16, merge=2, temporal_patch=2, resize=rule,
                      mean=(0.5,) * 3, std=(0.5,) * 3)
planner.plan(ImageItem(480, 640))
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
