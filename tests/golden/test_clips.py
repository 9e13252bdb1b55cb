"""Frames, grids, times and pixels of videos, exactly those of the official video processors (`make_clips.py`)."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from golden.make_clips import FILE, PROCESSORS, checksum, describe, synthetic_frames
from golden.test_patches import gathered
from opticnerve_server.models.base import PlanError, Sampling, VideoItem
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.grid import PATH, GridPlanner, StillResize
from opticnerve_server.models.video_processor import read_clips
from opticnerve_server.types import ItemPlan, Layout
from oracles import Media

GOLDEN: dict[str, list[Any]] = json.loads(FILE.read_text())

PATCHES = {"qwen3_vl": (16, 2), "gemma4": (16, 3)}
"""Side of a patch, and patches along the side of a token; (14, 2) elsewhere."""

CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
MEAN_STD = {"qwen3_vl": ((0.5,) * 3, (0.5,) * 3), "gemma4": ((0.0,) * 3, (1.0,) * 3)}


def planner_of(architecture: str, **settings: Any) -> GridPlanner:
    patch, merge = PATCHES.get(architecture, (14, 2))
    mean, std = MEAN_STD.get(architecture, CLIP)
    planner = GridPlanner(
        architecture=architecture,
        layout=Layout(8, 0),
        patch=patch,
        merge=merge,
        temporal_patch=1 if architecture in ("gemma4", "ernie4_5_vl_moe") else 2,
        fold=2 if architecture == "ernie4_5_vl_moe" else 1,
        resize=StillResize(factor=patch * merge, min_pixels=1, max_pixels=10**7),
        mean=mean,
        std=std,
    )
    return replace(planner, clips=read_clips({**PROCESSORS[architecture], **settings}, planner, None))


@pytest.mark.parametrize("architecture", PROCESSORS)
def test_plans_of_the_official_processors(architecture: str) -> None:
    planner = planner_of(architecture)
    outcomes: Counter[bool] = Counter()
    for _, frames, fps, height, width, sampling, *expected in (p for p in GOLDEN["plans"] if p[0] == architecture):
        item = VideoItem(frames, fps, height, width, Sampling(**sampling))
        outcomes[len(expected) > 1] += 1
        if len(expected) == 1:
            with pytest.raises(PlanError, match=r": |; "):
                planner.plan(item)
            continue
        stored, indices, grid, times, seconds = expected
        plan = planner.plan(item)
        found = [plan.grid[0], plan.tokens // plan.grid[0]] if architecture == "gemma4" else list(plan.grid)
        assert (len(plan.frame_indices), checksum(plan.frame_indices), found) == (stored, indices, grid), item
        assert checksum(span.timestamp for span in plan.spans) == times, item
        assert plan.second_per_grid_ts == seconds, item
        check(plan, planner.fold)
    assert outcomes.total() >= 515
    assert outcomes[True] >= 300, outcomes


def check(plan: ItemPlan, fold: int) -> None:
    """What must hold whatever the processor."""
    t, h, w = plan.grid
    path = plan.paths[PATH]
    assert path.units == t * h * w // plan.merge**2 == plan.tokens * fold == sum(s.rows for s in plan.spans) * fold
    assert (path.segments, path.longest) == (t, h * w)
    assert path.pixel_bytes == len(plan.frame_indices) * plan.height * plan.width * 3
    assert len(plan.timestamps) == t == len(plan.spans) * fold
    assert {span.kind for span in plan.spans} == {"frame"}
    assert list(plan.frame_indices) == sorted(set(plan.frame_indices))


@pytest.mark.parametrize("case", GOLDEN["pixels"], ids=lambda c: f"{c['architecture']} {c['video']}")
def test_pixels_of_the_official_processors(case: dict[str, Any]) -> None:
    architecture, (frames, fps, height, width) = case["architecture"], case["video"]
    draw = {"draw_on_frames": True} if architecture == "ernie4_5_vl_moe" else {}
    planner = planner_of(architecture, do_sample_frames=False, **draw)
    plan = planner.plan(VideoItem(frames, fps, height, width))
    assert plan.frame_indices == tuple(range(frames))
    pixels = np.empty(plan.pixel_bytes, np.uint8)
    planner.fill_pixels(iter(synthetic_frames(frames, height, width)), plan, pixels)
    assert describe(official_patches(pixels, plan, planner)) == case["sha256"]


TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")
"""Architectures of which a tower's own patches are compared."""


@pytest.mark.parametrize("architecture", TOWERS)
def test_towers_pad_the_last_group_as_the_official_processors_do(architecture: str, tmp_path: Path) -> None:
    write_checkpoint(architecture, tmp_path)
    planner, batch, expected = planner_of(architecture, do_sample_frames=False), [], []
    for case in (case for case in GOLDEN["pixels"] if case["architecture"] == architecture):
        frames, fps, height, width = case["video"]
        plan = planner.plan(VideoItem(frames, fps, height, width))
        pixels = np.empty(plan.pixel_bytes, np.uint8)
        planner.fill_pixels(iter(synthetic_frames(frames, height, width)), plan, pixels)
        batch.append(Media(plan, pixels.reshape(-1, plan.height, plan.width, 3)))
        expected.append(case["sha256"])
    patches = gathered(tmp_path, batch).split([media.plan.tokens * planner.merge**2 for media in batch])
    assert [describe(part.numpy()) for part in patches] == expected


def official_patches(pixels: npt.NDArray[np.uint8], plan: ItemPlan, planner: GridPlanner) -> npt.NDArray[np.float32]:
    """The stored frames as the processors pad, order and normalise them."""
    stored = pixels.reshape(-1, plan.height, plan.width, 3)
    tp, p, m = planner.temporal_patch, planner.patch, planner.merge
    t, rows, columns = plan.grid
    frames = stored[np.minimum(np.arange(t * tp), len(stored) - 1)].astype(np.float32)
    mean, std = np.array(planner.mean, np.float32), np.array(planner.std, np.float32)
    values = (frames - mean * np.float32(255)) / (std * np.float32(255))
    if planner.architecture == "gemma4":  # raster order, channels last, filled up to the most a frame can have
        tiles = values.reshape(t, rows, p, columns, p, 3).transpose(0, 1, 3, 2, 4, 5).reshape(t, rows * columns, -1)
        return np.pad(tiles, ((0, 0), (0, 70 * 9 - rows * columns), (0, 0)))
    tiles = values.reshape(t, tp, rows // m, m, p, columns // m, m, p, 3)
    return tiles.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(t * rows * columns, 3 * tp * p * p)
