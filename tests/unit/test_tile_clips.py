"""Videos of InternVL: frames as torch and the authors' code choose them, a tile each, parts, settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opticnerve_server.models import registry
from opticnerve_server.models.base import PlanError, Sampling, VideoItem
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.presets import VIDEO_PROCESSORS
from opticnerve_server.models.tiles import PATH, TilePlanner
from opticnerve_server.types import PathPlan

SIDE = {"height": 56, "width": 56}


@pytest.fixture
def planner_of(tmp_path: Path) -> Any:
    def build(architecture: str = "internvl", **changes: Any) -> TilePlanner:
        write_checkpoint(architecture, tmp_path)
        if architecture == "internvl":
            settings = {**VIDEO_PROCESSORS["internvl"], "size": SIDE, **changes}
            (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
        planner = registry.build_planner(registry.open_model(str(tmp_path), "safetensors"))
        assert isinstance(planner, TilePlanner)
        return planner

    return build


def lengths() -> list[int]:
    return [*range(1, 70), *np.random.default_rng(0).integers(70, 30000, 150).tolist()]


@pytest.mark.parametrize("number", [1, 2, 7, 8, 16, 31, 32, 64, 100])
def test_a_number_of_frames_is_the_official_ones(number: int, planner_of: Any) -> None:
    planner = planner_of(do_sample_frames=True, num_frames=number)
    for frames in lengths():
        if number > frames:
            with pytest.raises(PlanError, match=f"has {frames} frames, {number} are to be sampled"):
                planner.plan(VideoItem(frames, 25.0, 480, 640))
            continue
        step = frames / number
        expected = torch.arange(step / 2, frames, step).int().tolist()
        plan = planner.plan(VideoItem(frames, 25.0, 480, 640))
        assert list(plan.frame_indices) == expected
        count = len(expected)
        assert (plan.grid, plan.tokens) == ((count, 4, 4), 4 * count)
        assert plan.paths == {PATH: PathPlan(count, count, 17, count * 56 * 56 * 3)}
        assert [span.kind for span in plan.spans] == ["frame"] * count
        assert [span.timestamp for span in plan.spans] == [index / 25.0 for index in expected]


def test_a_rate_and_what_the_caller_asks_for(planner_of: Any) -> None:
    planner = planner_of()
    assert planner.modalities == ("image", "video")
    assert planner.plan(VideoItem(9, 3.0, 10, 20)).frame_indices == tuple(range(9))
    for frames, rate, wanted in ((100, 25.0, 2.0), (333, 29.97, 1.0), (1000, 60.0, 7.5)):
        count = int(frames / rate * wanted)
        expected = torch.arange(frames / count / 2, frames, frames / count).int().tolist()
        plan = planner.plan(VideoItem(frames, rate, 10, 20, Sampling(fps=wanted)))
        assert list(plan.frame_indices) == expected
    with pytest.raises(PlanError, match="too short for this model's sampling"):
        planner.plan(VideoItem(3, 25.0, 10, 20, Sampling(fps=1.0)))
    with pytest.raises(PlanError, match=r"sampling.max_frames is set, but .* can follow fps, num_frames"):
        planner.plan(VideoItem(30, 25.0, 10, 20, Sampling(max_frames=3)))


@pytest.mark.parametrize("number", [1, 2, 8, 32])
def test_the_authors_format_takes_every_frame_or_a_number(number: int, planner_of: Any) -> None:
    planner = planner_of("internvl_chat")
    assert planner.plan(VideoItem(9, 3.0, 10, 20)).frame_indices == tuple(range(9))
    for frames in lengths():
        if frames < number:
            continue
        part = float(frames - 1) / number
        expected = [int(part / 2 + np.round(part * i)) for i in range(number)]
        item = VideoItem(frames, 25.0, 10, 20, Sampling(num_frames=number))
        if len(set(expected)) < number:
            assert frames < 2 * number
            with pytest.raises(PlanError, match="would share some: ask for at most"):
                planner.plan(item)
        else:
            assert list(planner.plan(item).frame_indices) == expected


def test_frames_become_tiles_in_order_and_parts_are_whole_frames(planner_of: Any) -> None:
    planner = planner_of()
    pictures = np.random.default_rng(0).integers(0, 256, (5, 56, 56, 3), dtype=np.uint8)
    whole = planner.plan(VideoItem(5, 2.0, 56, 56))
    pixels = np.empty(whole.pixel_bytes, np.uint8)
    planner.fill_pixels(iter(pictures), whole, pixels)
    assert np.array_equal(pixels.reshape(pictures.shape), pictures)
    with pytest.raises(ValueError, match="zip"):
        planner.fill_pixels(iter(pictures[:4]), whole, pixels)
    parts = planner.split(whole, lambda part: part.paths[PATH].units <= 2)
    assert [part.grid[0] for part in parts] == [2, 2, 1]
    assert sum((part.spans for part in parts), ()) == whole.spans


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"video_processor_type": "Qwen2VLVideoProcessor"}, "video_processor_type is 'Qwen2VLVideoProcessor'"),
        ({"size": {"height": 448, "width": 448}}, "size is"),
        ({"initial_shift": False}, "initial_shift is False"),
        ({"image_mean": [0.5, 0.5, 0.5]}, "image_mean or image_std differ from those of images"),
        ({"num_frames": 8, "fps": 2}, "fps and num_frames are both set"),
        ({"merge_size": 2}, "merge_size is 2, a setting that this server does not implement"),
    ],
)
def test_settings_that_cannot_be_followed_refuse_videos_alone(
    changes: dict[str, Any], reason: str, planner_of: Any
) -> None:
    planner = planner_of(**changes)
    assert planner.modalities == ("image",)
    with pytest.raises(PlanError, match=f"the video processor of .*{reason}.*; send images"):
        planner.plan(VideoItem(8, 2.0, 100, 100))


def test_the_image_processors_file_serves_for_videos_too(planner_of: Any, tmp_path: Path) -> None:
    planner_of()
    (tmp_path / "video_preprocessor_config.json").unlink()
    planner = registry.build_planner(registry.open_model(str(tmp_path), "safetensors"))
    assert planner.modalities == ("image", "video")
    assert planner.plan(VideoItem(3, 2.0, 100, 100)).tokens == 12
