"""Published configurations, for use without their weights.

`PROCESSORS` are the published image processors by architecture, whose limits differ from transformers' class defaults.
Evidence for the numbers: the models' config.json and preprocessor_config.json.
"""

from __future__ import annotations

from typing import Any

PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
}
PROCESSORS["qwen3_vl_moe"] = PROCESSORS["qwen3_vl"]


def _qwen3_vl(depth: int, hidden: int, intermediate: int, out: int, deepstack: list[int]) -> dict[str, Any]:
    return {
        "depth": depth,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_heads": 16,
        "out_hidden_size": out,
        "deepstack_visual_indexes": deepstack,
        "num_position_embeddings": 2304,
        "hidden_act": "gelu_pytorch_tanh",
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
    }


def _qwen2_5_vl(intermediate: int, out: int) -> dict[str, Any]:
    return {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": intermediate,
        "num_heads": 16,
        "out_hidden_size": out,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
    }


def _config(architecture: str, vision_config: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": architecture, "vision_config": vision_config}


PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-vl-2b": _config("qwen3_vl", _qwen3_vl(24, 1024, 4096, 2048, [5, 11, 17])),
    "qwen3-vl-4b": _config("qwen3_vl", _qwen3_vl(24, 1024, 4096, 2560, [5, 11, 17])),
    "qwen3-vl-8b": _config("qwen3_vl", _qwen3_vl(27, 1152, 4304, 4096, [8, 16, 24])),
    "qwen3-vl-32b": _config("qwen3_vl", _qwen3_vl(27, 1152, 4304, 5120, [8, 16, 24])),
    "qwen3-vl-30b-a3b": _config("qwen3_vl_moe", _qwen3_vl(27, 1152, 4304, 2048, [8, 16, 24])),
    "qwen2.5-vl-3b": _config("qwen2_5_vl", _qwen2_5_vl(3420, 2048)),
    "qwen2.5-vl-7b": _config("qwen2_5_vl", _qwen2_5_vl(3420, 3584)),
    "qwen2.5-vl-32b": _config("qwen2_5_vl", _qwen2_5_vl(3456, 5120)),
}
"""config.json by preset name, the vision tower's part alone."""
