"""The settings of image processors: every published form is read, everything else is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2VLImageProcessorPil

from opticnerve_server.models.processor import QWEN2_VL, ProcessorError, ProcessorSettings, read_processor

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
QWEN3_VL = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
QWEN2_5_VL = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": list(CLIP_MEAN),
    "image_std": list(CLIP_STD),
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}
SAVED_BY_A_FAST_PROCESSOR = {
    **QWEN3_VL,
    "crop_size": None, "data_format": "channels_first", "default_to_square": True, "device": None,
    "disable_grouping": None, "do_center_crop": None, "do_convert_rgb": True, "do_normalize": True, "do_pad": False,
    "do_rescale": True, "do_resize": True, "input_data_format": None, "max_pixels": None, "min_pixels": None,
    "pad_size": None, "resample": 3, "rescale_factor": 0.00392156862745098, "return_tensors": None,
}  # fmt: skip


def read(processor: dict[str, Any], patch: int = 16) -> ProcessorSettings:
    return read_processor(processor, QWEN2_VL, patch=patch, merge=2, temporal_patch=2)


@pytest.mark.parametrize(
    "processor", [QWEN3_VL, SAVED_BY_A_FAST_PROCESSOR, {"image_processor": QWEN3_VL, "processor_class": "P"}]
)
def test_forms_of_qwen3_vl(processor: dict[str, Any]) -> None:
    assert read(processor) == ProcessorSettings(65536, 16777216, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"image_processor_type": "Qwen2_5_VLImageProcessor"},
        {"image_processor_type": None},
        {"size": {"min_pixels": 3136, "max_pixels": 12845056}},
        {"size": {"shortest_edge": 1, "longest_edge": 2}},  # the older names win
        {"size": {"shortest_edge": 3136, "longest_edge": 12845056}, "min_pixels": None, "max_pixels": None},
    ],
)
def test_forms_of_qwen2_5_vl(changes: dict[str, Any]) -> None:
    assert read({**QWEN2_5_VL, **changes}, patch=14) == ProcessorSettings(3136, 12845056, CLIP_MEAN, CLIP_STD)


@pytest.mark.parametrize(
    "settings", [{}, {"patch_size": 16, "min_pixels": 7}, {"patch_size": 16, "size": QWEN3_VL["size"]}]
)
def test_what_transformers_saves_and_its_defaults(settings: dict[str, Any], tmp_path: Path) -> None:
    official = Qwen2VLImageProcessorPil(**settings)
    official.save_pretrained(tmp_path)
    expected = ProcessorSettings(
        official.size["shortest_edge"], official.size["longest_edge"],
        tuple(official.image_mean), tuple(official.image_std),
    )  # fmt: skip
    saved = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert read(saved, patch=official.patch_size) == read(settings, patch=official.patch_size) == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("do_resize", False), ("do_rescale", False), ("do_normalize", False), ("do_convert_rgb", False),
        ("do_center_crop", True), ("do_pad", True), ("crop_size", {"height": 9, "width": 9}), ("resample", 2),
        ("rescale_factor", 1.0), ("rescale_factor", "1/255"), ("patch_size", 14), ("merge_size", 4),
        ("temporal_patch_size", 1), ("image_mean", [0.5]), ("image_std", 0.5), ("image_std", [0.5, 0.5, "0.5"]),
        ("size", {"height": 224, "width": 224}), ("size", {"shortest_edge": 224}), ("size", 224),
        ("size", {"shortest_edge": 9, "longest_edge": 8}), ("size", {"shortest_edge": 0, "longest_edge": 8}),
        ("size", {"shortest_edge": 1.5, "longest_edge": 8}), ("size", {"shortest_edge": True, "longest_edge": 8}),
        ("size", {"min_pixels": 3136, "max_pixels": 12845056}),
        ("image_processor_type", "CLIPImageProcessor"), ("image_processor_type", 3), ("something_new", 0.5),
    ],
)  # fmt: skip
def test_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ProcessorError) as caught:
        read({**QWEN3_VL, key: value})
    assert key in str(caught.value)
    assert repr(value) in str(caught.value)
