"""Published configurations, for use without their weights.

`PROCESSORS` are the published image processors by architecture, whose limits may differ from transformers' class
defaults. Evidence for the numbers: the models' config.json and preprocessor_config.json. A size is here only if its
numbers were seen; where no published limits were, the processor is that of the class defaults.
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
_CLIP = {
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
PROCESSORS["glm4v"] = {
    **_CLIP,
    "image_processor_type": "Glm4vImageProcessor",
    "size": {"shortest_edge": 12544, "longest_edge": 9633792},
}
PROCESSORS["glm4v_moe"] = {**PROCESSORS["glm4v"], "size": {"shortest_edge": 12544, "longest_edge": 11760000}}
PROCESSORS["glm46v"] = {**PROCESSORS["glm4v_moe"], "image_processor_type": "Glm46VImageProcessor"}
PROCESSORS["ernie4_5_vl_moe"] = {
    **_CLIP,
    "temporal_patch_size": 1,
    "image_processor_type": "Ernie4_5_VLMoeImageProcessor",
    "size": {"shortest_edge": 3136, "longest_edge": 4842768},
}
PROCESSORS["gemma4"] = {
    "image_processor_type": "Gemma4ImageProcessor",
    "do_normalize": False,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "max_soft_tokens": 280,
}
PROCESSORS["gemma3"] = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 896, "width": 896},
    "resample": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
PROCESSORS["internvl"] = {
    "image_processor_type": "GotOcr2ImageProcessor",
    "size": {"height": 448, "width": 448},
    "crop_to_patches": True,
    "min_patches": 1,
    "max_patches": 12,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
PROCESSORS["internvl_chat"] = {
    "dynamic_image_size": True,
    "use_thumbnail": True,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 12,
}
PROCESSORS["llama4"] = {
    "image_processor_type": "Llama4ImageProcessorFast",
    "size": {"height": 336, "width": 336},
    "resample": 2,
    "max_patches": 16,
    "resize_to_max_canvas": False,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
PROCESSORS["kimi_vl"] = {
    "image_processor_type": "KimiVLImageProcessor",
    "patch_size": 14,
    "merge_kernel_size": [2, 2],
    "in_token_limit": 4096,
    "pad_input": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
PROCESSORS["deepseek_ocr"] = {
    "base_size": 1024,
    "image_size": 640,
    "crop_mode": True,
    "max_crops": 6,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
for _same in ("step3_vl", "step_vl", "step3p7"):
    PROCESSORS[_same] = {
        "size": {"height": 728, "width": 728},
        "patch_size": 504,
        "max_image_size": 3024,
        "image_mean": _CLIP["image_mean"],
        "image_std": _CLIP["image_std"],
    }
PROCESSORS["qwen2_vl"] = {**PROCESSORS["qwen2_5_vl"], "max_pixels": 1003520}
for _same in ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"):
    PROCESSORS[_same] = PROCESSORS["qwen3_vl"]

VIDEO_PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 4096, "longest_edge": 25165824},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "qwen2_5_vl": PROCESSORS["qwen2_5_vl"],  # published without a file of its own: images and videos share the limits
    "glm4v": {"video_processor_type": "Glm4vVideoProcessor"},
    "glm46v": {"video_processor_type": "Glm46VVideoProcessor"},
    "ernie4_5_vl_moe": {"video_processor_type": "Ernie4_5_VLMoeVideoProcessor"},
    "gemma4": {"video_processor_type": "Gemma4VideoProcessor"},
    "internvl": {
        "video_processor_type": "InternVLVideoProcessor",
        "size": {"height": 448, "width": 448},
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    },
}
"""The published video processors by architecture; one that is not here takes no videos."""
for _same, _as in (
    ("qwen2_vl", "qwen2_5_vl"), ("qwen3_vl_moe", "qwen3_vl"), ("qwen3_5", "qwen3_vl"), ("qwen3_5_moe", "qwen3_vl"),
    ("glm4v_moe", "glm4v"),
):  # fmt: skip
    VIDEO_PROCESSORS[_same] = VIDEO_PROCESSORS[_as]


def _qwen3_vl(
    depth: int, hidden: int, intermediate: int, out: int, deepstack: list[int], heads: int = 16
) -> dict[str, Any]:
    return {
        "depth": depth,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_heads": heads,
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


def _glm4v(intermediate: int) -> dict[str, Any]:
    return {
        "depth": 24,
        "hidden_size": 1536,
        "intermediate_size": intermediate,
        "num_heads": 12,
        "out_hidden_size": 4096,
        "image_size": 336,
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
    }


def _gemma4(layers: int, hidden: int, intermediate: int, heads: int, head_dim: int, *, small: bool) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "use_clipped_linears": small,
        "standardize": not small,
        "hidden_activation": "gelu_pytorch_tanh",
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "position_embedding_size": 10240,
        "rms_norm_eps": 1e-6,
    }


_GEMMA4_SMALL = _gemma4(16, 768, 3072, 12, 64, small=True)
_GEMMA4_LARGE = _gemma4(27, 1152, 4304, 16, 72, small=False)

_GEMMA3 = {
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "vision_use_head": False,
}


_LLAMA4 = {
    "num_hidden_layers": 34,
    "hidden_size": 1408,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "vision_output_dim": 4096,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
    "pixel_shuffle_ratio": 0.5,
    "rope_theta": 10000,
}

_ERNIE = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_heads": 16,
    "hidden_act": "quick_gelu",
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_merge_size": 2,
    "in_channels": 3,
}


def _config(architecture: str, vision_config: dict[str, Any], text_hidden: int | None = None) -> dict[str, Any]:
    """`text_hidden` where the tower's width is the language model's and not in vision_config."""
    text = {} if text_hidden is None else {"text_config": {"hidden_size": text_hidden}}
    return {"model_type": architecture, "vision_config": vision_config, **text}


_DEEPSEEK_OCR: dict[str, Any] = {
    "model_type": "deepseek_ocr",
    "projector_config": {"projector_type": "linear", "input_dim": 2048, "n_embed": 1280},
    "vision_config": {
        "image_size": 1024,
        "width": {
            "sam_vit_b": {
                "width": 768,
                "layers": 12,
                "heads": 12,
                "global_attn_indexes": [2, 5, 8, 11],
                "downsample_channels": [512, 1024],
            },
            "clip-l-14-224": {"width": 1024, "layers": 24, "heads": 16, "image_size": 224, "patch_size": 14},
        },
    },
}

_STEP3P7: dict[str, Any] = {
    "model_type": "step3p7",
    "understand_projector_stride": 2,
    "projector_bias": False,
    "text_config": {"hidden_size": 4096},
    "vision_config": {
        "width": 1536,
        "layers": 47,
        "heads": 16,
        "mlp_ratio": 8960 / 1536,
        "image_size": 728,
        "patch_size": 14,
        "hidden_act": "quick_gelu",
    },
}

PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-vl-2b": _config("qwen3_vl", _qwen3_vl(24, 1024, 4096, 2048, [5, 11, 17])),
    "qwen3-vl-4b": _config("qwen3_vl", _qwen3_vl(24, 1024, 4096, 2560, [5, 11, 17])),
    "qwen3-vl-8b": _config("qwen3_vl", _qwen3_vl(27, 1152, 4304, 4096, [8, 16, 24])),
    "qwen3-vl-32b": _config("qwen3_vl", _qwen3_vl(27, 1152, 4304, 5120, [8, 16, 24])),
    "qwen3-vl-30b-a3b": _config("qwen3_vl_moe", _qwen3_vl(27, 1152, 4304, 2048, [8, 16, 24])),
    "qwen3.5-0.8b": _config("qwen3_5", _qwen3_vl(12, 768, 3072, 1024, [], heads=12)),
    "qwen3.5-4b": _config("qwen3_5", _qwen3_vl(24, 1024, 4096, 2560, [])),
    "qwen3.5-27b": _config("qwen3_5", _qwen3_vl(27, 1152, 4304, 5120, [])),
    "qwen3.5-35b-a3b": _config("qwen3_5_moe", _qwen3_vl(27, 1152, 4304, 2048, [])),
    "qwen3.6-27b": _config("qwen3_5", _qwen3_vl(27, 1152, 4304, 5120, [])),
    "qwen3.6-35b-a3b": _config("qwen3_5_moe", _qwen3_vl(27, 1152, 4304, 2048, [])),
    "qwen2-vl-2b": _config("qwen2_vl", {"hidden_size": 1536, "in_chans": 3, "spatial_patch_size": 14}),
    "qwen2.5-vl-3b": _config("qwen2_5_vl", _qwen2_5_vl(3420, 2048)),
    "qwen2.5-vl-7b": _config("qwen2_5_vl", _qwen2_5_vl(3420, 3584)),
    "qwen2.5-vl-32b": _config("qwen2_5_vl", _qwen2_5_vl(3456, 5120)),
    "glm-4.1v-9b": _config("glm4v", _glm4v(13696)),
    "glm-4.5v": _config("glm4v_moe", _glm4v(10944)),
    "ernie-4.5-vl-28b-a3b": _config("ernie4_5_vl_moe", _ERNIE, 2560),
    "gemma-4-e2b": _config("gemma4", _GEMMA4_SMALL, 1536),
    "gemma-4-e4b": _config("gemma4", _GEMMA4_SMALL, 2560),
    "gemma-4-26b-a4b": _config("gemma4", _GEMMA4_LARGE, 2816),
    "gemma-4-31b": _config("gemma4", _GEMMA4_LARGE, 5376),
    "gemma-3-4b": _config("gemma3", _GEMMA3, 2560),
    "gemma-3-12b": _config("gemma3", _GEMMA3, 3840),
    "gemma-3-27b": _config("gemma3", _GEMMA3, 5376),
    "llama-4-scout": _config("llama4", _LLAMA4, 5120),
    "llama-4-maverick": _config("llama4", _LLAMA4, 5120),
    "deepseek-ocr": _DEEPSEEK_OCR,
    "step-3.7-flash": _STEP3P7,
}
"""config.json by preset name, the vision tower's part alone."""
