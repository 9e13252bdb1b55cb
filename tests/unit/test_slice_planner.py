"""MiniCPM-V's planner against its processor's rule, which is restated here from its description alone."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from image_sizes import sizes
from opticnerve_server.models import registry
from opticnerve_server.models.base import ImageItem, PlanError, VideoItem
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.registry import ModelError
from opticnerve_server.models.slices import SlicePlanner, SliceRule, Slices
from opticnerve_server.types import Span

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


@pytest.fixture
def planner(tmp_path: Path) -> SlicePlanner:
    """That of a small checkpoint of 2.6: slices of about 56 x 56 pixels, 4 tokens each."""
    write_checkpoint("minicpmv", tmp_path)
    planner = registry.build_planner(registry.open_model(str(tmp_path), "safetensors"))
    assert isinstance(planner, SlicePlanner)
    return planner


def test_spans_and_pixels_of_an_image(planner: SlicePlanner) -> None:
    """The whole picture, then cells from left to right and downwards, each as Pillow resizes and crops them."""
    image = np.random.default_rng(0).integers(0, 256, (90, 150, 3), dtype=np.uint8)
    plan = planner.plan(ImageItem(90, 150))
    slices = planner.rule(90, 150)
    assert (slices.rows, slices.columns) == (2, 3)
    places = [("global", 0, 0)] + [("tile", i, j) for i in range(2) for j in range(3)]
    assert [(span.kind, span.tile_row, span.tile_col) for span in plan.spans] == places
    assert {span.rows for span in plan.spans} == {4}
    assert plan.tokens == 28
    out = np.empty(plan.pixel_bytes, np.uint8)
    planner.fill_pixels(image, plan, out)
    (height, width), picture = slices.cell, Image.fromarray(image)
    refined = picture.resize((3 * width, 2 * height), Image.Resampling.BICUBIC)
    boxes = [(j * width, i * height, (j + 1) * width, (i + 1) * height) for i in range(2) for j in range(3)]
    whole = picture.resize(slices.whole[::-1], Image.Resampling.BICUBIC)
    expected = [np.asarray(picture).ravel() for picture in (whole, *(refined.crop(box) for box in boxes))]
    assert np.array_equal(out, np.concatenate(expected))
    assert planner.plan(ImageItem(20, 20)).spans == (Span(kind="image", rows=4),)


def test_a_video_is_a_picture_a_frame(planner: SlicePlanner) -> None:
    """One frame a second, at most 64 by the middles of equal parts; frames are cut into two cells at most."""
    plan = planner.plan(VideoItem(50, 24.6, 100, 60))
    assert plan.frame_indices == (0, 25)
    assert plan.timestamps == (0.0, 25 / 24.6)
    assert [(span.kind, span.tile_row, span.timestamp) for span in plan.spans] == [
        (kind, row, time) for time in plan.timestamps for kind, row in (("frame", 0), ("tile", 0), ("tile", 1))
    ]
    assert plan.tokens == 2 * 3 * 4
    long = planner.plan(VideoItem(1000, 10.0, 20, 20))
    gap = 100 / 64
    assert long.frame_indices == tuple(10 * int(i * gap + gap / 2) for i in range(64))
    assert planner.plan(VideoItem(5, 0.3, 20, 20)).frame_indices == (0, 1, 2, 3, 4)
    frames = np.random.default_rng(1).integers(0, 256, (2, 100, 60, 3), dtype=np.uint8)
    out = np.empty(plan.pixel_bytes, np.uint8)
    planner.fill_pixels(frames, plan, out)
    still = SliceRule(side=56, patch=14, most=2)
    alone = dataclasses.replace(planner, rule=still)
    for frame, found in zip(frames, out.reshape(2, -1), strict=True):
        expected = np.empty_like(found)
        alone.fill_pixels(frame, alone.plan(ImageItem(100, 60)), expected)
        assert np.array_equal(found, expected)
    with pytest.raises(ValueError, match="zip"):
        planner.fill_pixels(frames[:1], plan, out)


def test_parts_are_runs_of_whole_slices(planner: SlicePlanner) -> None:
    plan = planner.plan(ImageItem(168, 168))
    parts = planner.split(plan, lambda part: part.paths["default"].units <= 14)
    assert len(parts) > 1
    assert all(part.paths["default"].units <= 14 for part in parts)
    assert sum((part.spans for part in parts), ()) == plan.spans
    assert sum((part.grids for part in parts), ()) == plan.grids
    assert sum(part.tokens for part in parts) == plan.tokens
    assert sum(part.pixel_bytes for part in parts) == plan.pixel_bytes
    assert planner.split(plan, lambda part: True) == [plan]
    assert planner.split(plan, lambda part: False) == [plan]


@pytest.mark.parametrize("version", ["2.5", "2.6"])
def test_what_the_planner_refuses(version: str, tmp_path: Path) -> None:
    write_checkpoint("minicpmv", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "version": version}))
    planner = registry.build_planner(registry.open_model(str(tmp_path), "safetensors"))
    with pytest.raises(PlanError, match="both sides must be at least 1"):
        planner.plan(ImageItem(0, 5))
    assert planner.modalities == (("image",) if version == "2.5" else ("image", "video"))
    if version == "2.5":
        with pytest.raises(PlanError, match="takes no videos"):
            planner.plan(VideoItem(5, 1.0, 20, 20))


@pytest.mark.parametrize(
    ("key", "value"),
    [("patch_size", 16), ("image_feature_size", 64), ("slice_mode", False), ("max_slice_nums", 0), ("crop", 3)],
)
def test_processors_that_are_refused_by_name(key: str, value: object, tmp_path: Path) -> None:
    write_checkpoint("minicpmv", tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(ModelError, match=f"{key} is"):
        registry.build_planner(registry.open_model(str(tmp_path), "safetensors"))
