"""Writes small random checkpoints in Hugging Face layout, for demos and tests: real names, random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from .. import attention
from . import registry
from .presets import PROCESSORS, VIDEO_PROCESSORS
from .weights import MODEL, DummyTensors, stored_name

_VISION: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "depth": 4,
        "hidden_size": 96,
        "intermediate_size": 200,
        "num_heads": 4,
        "out_hidden_size": 128,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 2],
    },
    "qwen2_vl": {"depth": 4, "embed_dim": 96, "hidden_size": 128, "num_heads": 4, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "depth": 4,
        "hidden_size": 96,
        "intermediate_size": 172,
        "num_heads": 4,
        "out_hidden_size": 128,
        "window_size": 112,
        "fullatt_block_indexes": [1, 3],
    },
}
_VISION["glm4v"] = _VISION["glm46v"] = _VISION["glm4v_moe"] = {
    "depth": 3,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_heads": 4,
    "out_hidden_size": 128,
    "image_size": 224,
}
_VISION["ernie4_5_vl_moe"] = {"depth": 3, "hidden_size": 96, "intermediate_size": 200, "num_heads": 4}
_VISION["gemma4"] = {
    "num_hidden_layers": 3,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "position_embedding_size": 2048,
    "use_clipped_linears": True,
    "standardize": True,
}
_VISION["qwen3_vl_moe"] = _VISION["qwen3_vl"]
_VISION["qwen3_5"] = _VISION["qwen3_5_moe"] = {**_VISION["qwen3_vl"], "deepstack_visual_indexes": []}

_VISION["gemma3"] = {
    "num_hidden_layers": 3,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_attention_heads": 4,
    "image_size": 112,
    "patch_size": 14,
}

_VISION["internvl"] = {
    **_VISION["gemma3"],
    "image_size": [56, 56],
    "patch_size": [14, 14],
    "attention_bias": True,
    "use_qk_norm": True,
    "norm_type": "rms_norm",
}
_VISION["internvl_chat"] = {**_VISION["gemma3"], "image_size": 56, "qkv_bias": True, "norm_type": "layer_norm"}

_VISION["kimi_vl"] = {
    "num_hidden_layers": 3,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_attention_heads": 4,
    "init_pos_emb_height": 16,
    "init_pos_emb_width": 16,
}
_VISION["llama4"] = {
    **_VISION["gemma3"],
    "image_size": 56,
    "intermediate_size": 384,
    "vision_output_dim": 80,
    "projector_input_dim": 80,
    "projector_output_dim": 80,
}

_VISION["deepseek_ocr"] = {
    "image_size": 256,
    "width": {
        "sam_vit_b": {
            "width": 64, "layers": 3, "heads": 4, "global_attn_indexes": [1], "downsample_channels": [80, 96],
        },
        "clip-l-14-224": {"width": 96, "layers": 2, "heads": 4, "image_size": 56, "patch_size": 14},
    },
}  # fmt: skip

_VISION["step_vl"] = _VISION["step3p7"] = {
    "width": 96,
    "layers": 3,
    "heads": 4,
    "mlp_ratio": 2.0,
    "image_size": 112,
    "patch_size": 14,
}
_VISION["step3_vl"] = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 200,
    "output_hidden_size": 120,
    "image_size": 112,
    "patch_size": 14,
}

_SETTINGS: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4},
    "deepseek_ocr": {"projector_config": {"projector_type": "linear", "n_embed": 128}},
    "step3_vl": {"understand_projector_stride": 2, "projector_bias": False},
    "internvl_chat": {**PROCESSORS["internvl_chat"], "ps_version": "v2", "llm_config": {"hidden_size": 128}},
}
"""What else config.json says, by architecture."""

_TILES: dict[str, dict[str, Any]] = {
    "gemma3": {"size": {"height": 112, "width": 112}},
    "internvl": {"size": {"height": 56, "width": 56}},
    "llama4": {"size": {"height": 56, "width": 56}},
    "deepseek_ocr": {"base_size": 256, "image_size": 192},
}
"""Changes to the published processors: those of tiles, which would make the small towers slow, are smaller."""
for _step in ("step3_vl", "step_vl", "step3p7"):
    _TILES[_step] = {"size": {"height": 112, "width": 112}, "patch_size": 84, "max_image_size": 504}

_TEXT = {"hidden_size": 128}
"""The language model's configuration, for the towers whose rows are as wide."""

_BARE = {
    "qwen2_vl": ("visual.",),
    "qwen2_5_vl": ("visual.",),
    "ernie4_5_vl_moe": ("vision_model.",),
    "internvl_chat": ("vision_model.", "mlp1."),
    "llama4": ("vision_model.", "multi_modal_projector."),
    "kimi_vl": ("vision_tower.", "multi_modal_projector."),
    **dict.fromkeys(("step3_vl", "step_vl", "step3p7"), ("vision_model.", "vit_")),
}
"""Prefixes that published files do not put "model." before, by architecture."""

_VOCABULARY = 16


class _Recorder(DummyTensors):
    """Random tensors that remember what was taken."""

    def __init__(self, seed: int) -> None:
        super().__init__(torch.device("cpu"), torch.bfloat16, seed)
        self.taken: dict[str, torch.Tensor] = {}

    def take(self, name: str, *shape: int) -> torch.Tensor:
        self.taken[name] = super().take(name, *shape)
        return self.taken[name]


def write_checkpoint(architecture: str, directory: Path, seed: int = 0) -> None:
    """Write config.json, the files of the two processors and model.safetensors into `directory`, which is made.

    Weights are bfloat16 random numbers of `seed`, the tower small but with every branch of its family, the pixel limits
    those published; tiles are small too. A tensor of a language model is there, as in a real checkpoint. No font is:
    ERNIE's videos, onto which its own is written, need that beside the files.

    Raises ModelError for an unknown architecture and for a directory that holds anything, OSError where it cannot be
    written.
    """
    if architecture not in _VISION:
        raise registry.ModelError(f"unknown architecture {architecture!r}: use one of {', '.join(_VISION)}")
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise registry.ModelError(f"{directory} is not empty: name a directory that is, or that is not there yet")
    names = [name for name, known in registry.CLASSES.items() if known == architecture]
    config: dict[str, Any] = {
        "architectures": names,
        "model_type": architecture,
        "vision_config": _VISION[architecture],
        "text_config": _TEXT,
        **_SETTINGS.get(architecture, {}),
    }
    processor = {**PROCESSORS[architecture], **_TILES.get(architecture, {})}
    source = registry.ModelSource(directory.name, architecture, config, processor, directory)
    tensors = _Recorder(seed)
    backend, _ = attention.resolve("sdpa", tensors.device, tensors.dtype, head_dim=0)
    tower_class = registry.tower_class(architecture)
    parsed = tower_class.read_config(config)
    tower_class(parsed, registry.build_planner(source), tensors, backend)
    bare = _BARE.get(architecture, ())
    stored = {}
    for name, tensor in tensors.taken.items():
        published = stored_name(name, tower_class.prefixes)
        stored[published if published.startswith(bare) else MODEL + published] = tensor
    language = "model.embed_tokens.weight" if bare else "model.language_model.embed_tokens.weight"
    stored[language] = tensors.take(language, _VOCABULARY, parsed.out_hidden_size)
    # Not save_file, whose files only their owner may read.
    (directory / "model.safetensors").write_bytes(save(stored, metadata={"format": "pt"}))
    files = {"config.json": config, "preprocessor_config.json": processor}
    if architecture in registry.IN_CONFIG:
        del files["preprocessor_config.json"]
    if architecture in VIDEO_PROCESSORS:
        files["video_preprocessor_config.json"] = {**VIDEO_PROCESSORS[architecture], **_TILES.get(architecture, {})}
    for file, content in files.items():
        (directory / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
