"""Reading video processors: which file counts, what it is taken to mean, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ImageFont

from opticnerve_server.models import registry
from opticnerve_server.models.base import ImageItem, PlanError, VideoItem
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.clip import EachFrame, NoClips, SampledClips, WholeClip
from opticnerve_server.models.grid import GridPlanner
from opticnerve_server.models.presets import PRESETS
from opticnerve_server.models.stamps import stamp

VIDEO = VideoItem(60, 25.0, 96, 160)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_checkpoint("qwen3_vl", tmp_path / "model")
    for path in (tmp_path / "model").glob("video*"):
        path.unlink()
    return tmp_path / "model"


def planner_of(directory: Path, video: dict[str, Any] | None = None, load_format: str = "safetensors") -> GridPlanner:
    if video is not None:
        (directory / "video_preprocessor_config.json").write_text(json.dumps(video))
    planner = registry.build_planner(registry.open_model(str(directory), load_format))
    assert isinstance(planner, GridPlanner)
    return planner


def clips_of(directory: Path, video: dict[str, Any] | None = None) -> SampledClips:
    clips = planner_of(directory, video).clips
    assert isinstance(clips, SampledClips), clips
    return clips


def refusal(directory: Path, video: dict[str, Any]) -> str:
    planner = planner_of(directory, video)
    assert planner.plan(ImageItem(96, 160)).tokens > 0
    with pytest.raises(PlanError) as caught:
        planner.plan(VIDEO)
    return str(caught.value)


QWEN3: dict[str, Any] = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 4096, "longest_edge": 25165824},
}


def test_the_newest_file_counts(directory: Path) -> None:
    image = json.loads((directory / "preprocessor_config.json").read_text())
    image_limits = (image["size"]["shortest_edge"], image["size"]["longest_edge"])

    def limits() -> tuple[int, int]:
        resize = clips_of(directory).resize
        assert isinstance(resize, (WholeClip, EachFrame))
        return resize.rule.min_pixels, resize.rule.max_pixels  # type: ignore[union-attr]

    assert limits() == image_limits
    (directory / "video_preprocessor_config.json").write_text(json.dumps(QWEN3))
    assert limits() == (4096, 25165824)
    newest = {"video_processor": {**QWEN3, "size": {"shortest_edge": 2048, "longest_edge": 4096}}}
    (directory / "processor_config.json").write_text(json.dumps(newest))
    assert limits() == (2048, 4096)
    (directory / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3VLProcessor"}))
    assert limits() == (4096, 25165824)


def test_an_image_processor_names_the_class_beside_it(directory: Path) -> None:
    path = directory / "preprocessor_config.json"
    image = json.loads(path.read_text())
    for name, resize in (
        ("Qwen2VLImageProcessor", EachFrame),
        ("Qwen2VLImageProcessorFast", WholeClip),  # which names no class: that of the model counts
        (None, WholeClip),
    ):
        path.write_text(json.dumps({**image, "image_processor_type": name}))
        assert isinstance(clips_of(directory).resize, resize)


def test_without_any_file_images_alone_are_taken(directory: Path) -> None:
    image = json.loads((directory / "preprocessor_config.json").read_text())
    (directory / "preprocessor_config.json").unlink()
    (directory / "processor_config.json").write_text(json.dumps({"image_processor": image}))
    planner = planner_of(directory)
    assert isinstance(planner.clips, NoClips)
    with pytest.raises(PlanError, match=r"model has no video_preprocessor_config.json: send images"):
        planner.plan(VIDEO)
    assert isinstance(planner_of(directory, load_format="dummy").clips, SampledClips)  # the published one


@pytest.mark.parametrize(("settings", "message"), [
    ({"video_processor_type": "Glm4vVideoProcessor"}, "video_processor_type is 'Glm4vVideoProcessor', this model's is"),
    ({"patch_size": 14}, "patch_size is 14, must be 16"),
    ({"merge_size": 4}, "merge_size is 4, must be 2"),
    ({"temporal_patch_size": 1}, "temporal_patch_size is 1, must be 2"),
    ({"image_mean": [0.4, 0.4, 0.4]}, "image_mean or image_std differ from those of images"),
    ({"do_resize": False}, "do_resize is False"),
    ({"do_normalize": False}, "do_normalize is False"),
    ({"do_center_crop": True}, "do_center_crop is True, a setting that this server does not implement"),
    ({"cap_pixels_per_frame": True}, "cap_pixels_per_frame is True"),
    ({"resample": 2}, "resample is 2"),
    ({"size": {"height": 3, "width": 3}}, "size is"),
    ({"fps": 0}, "fps is 0, must be a positive number"),
    ({"fps": "2"}, "fps is '2'"),
    ({"min_frames": 1.5}, "min_frames is 1.5, must be a positive whole number"),
    ({"num_frames": 8}, "fps and num_frames are both set"),
    ({"do_sample_frames": 1}, "do_sample_frames is 1, must be true or false"),
    ({"video_processor_type": "Qwen2VLVideoProcessor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
      "patch_size": 16, "do_sample_frames": True}, "do_sample_frames is true without fps or num_frames"),
])  # fmt: skip
def test_what_cannot_be_followed_refuses_videos_by_name(
    directory: Path, settings: dict[str, Any], message: str
) -> None:
    text = refusal(directory, {**QWEN3, **settings})
    assert text.startswith("the video processor of model: ")
    assert message in text
    assert text.endswith("; send images")


def test_settings_without_effect(directory: Path) -> None:
    saved = {
        "do_convert_rgb": True, "do_resize": True, "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "do_sample_frames": True, "fps": 2, "return_metadata": False, "patch_size": 16,
        "temporal_patch_size": 2, "merge_size": 2, "min_frames": 4, "max_frames": 768, "max_video_tokens": 768,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor", "num_frames": None,
    }  # fmt: skip
    plain, full = planner_of(directory, QWEN3).plan(VIDEO), planner_of(directory, {**QWEN3, **saved}).plan(VIDEO)
    assert plain == full
    assert plain.grid[0] == 2
    assert plain.timestamps == ((0 + 20) / 2 / 25, (39 + 59) / 2 / 25)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_take_videos(name: str) -> None:
    planner = registry.build_planner(registry.open_model(f"preset:{name}", "dummy"))
    if name.startswith(("deepseek-ocr", "gemma-3", "kimi-vl", "llama-4", "step-3")):
        assert planner.modalities == ("image",)
        return
    plan = planner.plan(VIDEO)
    assert plan.kind == "video"
    assert plan.tokens == sum(span.rows for span in plan.spans) > 0
    assert (plan.second_per_grid_ts > 0) == name.startswith("qwen2.5")


def test_the_font_of_a_model_that_writes_times_onto_frames(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    write_checkpoint("ernie4_5_vl_moe", directory)
    for path in directory.glob("*.ttf"):
        path.unlink()
    settings = {"video_processor_type": "Ernie4_5_VLMoeVideoProcessor"}
    assert "font 'Roboto-Regular.ttf' is no font file beside it" in refusal(directory, settings)
    (directory / "Roboto-Regular.ttf").write_bytes(b"no font")
    assert "is no font file" in refusal(directory, settings)
    plain = planner_of(directory, {**settings, "draw_on_frames": False})
    font = ImageFont.load_default(10)
    assert isinstance(font, ImageFont.FreeTypeFont)
    (directory / "Roboto-Regular.ttf").write_bytes(font.font_bytes)
    stamped = planner_of(directory, settings)
    short = VideoItem(3, 25.0, 96, 160)
    plan = stamped.plan(short)
    assert plan == plain.plan(short)
    grey = [np.full((96, 160, 3), 120, np.uint8)] * len(plan.frame_indices)
    one, other = np.empty(plan.pixel_bytes, np.uint8), np.empty(plan.pixel_bytes, np.uint8)
    stamped.fill_pixels(iter(grey), plan, one)
    plain.fill_pixels(iter(grey), plan, other)
    assert set(other) == {120}
    changed = (one != other).reshape(-1, plan.height, plan.width, 3).any(axis=3)
    assert changed[:, : plan.height // 5].any(axis=(1, 2)).all()
    assert not changed[:, plan.height // 5 :].any()
    assert one.min() < 20
    assert one.max() > 130
    with pytest.raises(PlanError, match=r"9 x 160 pixels .* writes the time onto them, which takes 10 pixels a side"):
        stamped.plan(VideoItem(60, 25.0, 9, 160))


@pytest.mark.parametrize(("seconds", "text"), [
    (0.0, "time: 00:00:00.00"), (61.5, "time: 00:01:01.50"), (3723.041, "time: 01:02:03.04"),
    (59.999, "time: 00:00:60.00"),  # as the official processor writes it
])  # fmt: skip
def test_the_text_of_times(seconds: float, text: str) -> None:
    assert stamp(seconds) == text


def test_a_video_needs_as_many_frames_as_planned(directory: Path) -> None:
    planner = planner_of(directory, QWEN3)
    plan = planner.plan(VIDEO)
    frame = np.zeros((96, 160, 3), np.uint8)
    out = np.empty(plan.pixel_bytes, np.uint8)
    for count in (len(plan.frame_indices) - 1, len(plan.frame_indices) + 1):
        with pytest.raises(ValueError, match="zip"):
            planner.fill_pixels(iter([frame] * count), plan, out)


def test_frames_without_pixels(directory: Path) -> None:
    with pytest.raises(PlanError, match="both sides must be at least 1"):
        planner_of(directory, QWEN3).plan(VideoItem(60, 25.0, 0, 160))
