"""Tiny models of transformers, one of every architecture: what `oracles.save_model` saves and towers are held to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers as hf

TEXT = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]},
}
VISION = {"depth": 4, "hidden_size": 64, "intermediate_size": 100, "num_heads": 4, "out_hidden_size": 48}
TOKENS = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}
MARKS = {
    "image_token_id": 120, "image_start_token_id": 122, "image_end_token_id": 123,
    "video_token_id": 121, "video_start_token_id": 124, "video_end_token_id": 125,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

Vision = dict[str, Any]


@dataclass(frozen=True)
class TinyModel:
    """How to make one: `build` takes changes to the small vision_config. `fold` frames of a video share a token."""

    build: Callable[[Vision], Any] | None  # None where transformers has parts of it alone
    processor: Any  # None where the official one needs torchvision
    patch: int
    merge: int = 2
    temporal: int = 2
    fold: int = 1
    side: int = 0  # pixels of a tile, 0 where an image is a grid
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the processor, instead of those published
    as_is: Mapping[str, Any] = field(default_factory=lambda: {"do_resize": False})  # how it takes a tile for a tile


def qwen2_vl(vision: Vision) -> Any:
    tower = {"depth": 3, "embed_dim": 64, "hidden_size": 48, "num_heads": 4, "mlp_ratio": 2, **vision}
    return hf.Qwen2VLForConditionalGeneration(hf.Qwen2VLConfig(text_config=TEXT, vision_config=tower, **TOKENS))


def qwen2_5_vl(vision: Vision) -> Any:
    tower = {**VISION, "intermediate_size": 84, "fullatt_block_indexes": [1, 3], **vision}
    return hf.Qwen2_5_VLForConditionalGeneration(hf.Qwen2_5_VLConfig(text_config=TEXT, vision_config=tower, **TOKENS))


def qwen3_vl(vision: Vision, *, moe: bool = False) -> Any:
    tower = {**VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2, 3], **vision}
    text = {**TEXT, "head_dim": 12, **(EXPERTS if moe else {})}
    config = (hf.Qwen3VLMoeConfig if moe else hf.Qwen3VLConfig)(text_config=text, vision_config=tower, **TOKENS)
    return (hf.Qwen3VLMoeForConditionalGeneration if moe else hf.Qwen3VLForConditionalGeneration)(config)


def qwen3_5(vision: Vision, *, moe: bool = False) -> Any:
    tower = {**VISION, "depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [], **vision}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    rope = {**TEXT["rope_parameters"], "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}  # type: ignore[dict-item]
    text = {**TEXT, "head_dim": 16, **linear, "linear_value_head_dim": 16, "rope_parameters": rope}
    text |= {**EXPERTS, "shared_expert_intermediate_size": 32} if moe else {}
    config = (hf.Qwen3_5MoeConfig if moe else hf.Qwen3_5Config)(text_config=text, vision_config=tower, **TOKENS)
    return (hf.Qwen3_5MoeForConditionalGeneration if moe else hf.Qwen3_5ForConditionalGeneration)(config)


def glm4v(vision: Vision, *, kind: str = "glm4v") -> Any:
    tower = {**VISION, "depth": 3, "intermediate_size": 80, "image_size": 112, **vision}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}
    text = {**TEXT, "rope_parameters": rope}
    if kind == "glm46v":
        towers = {
            "text_config": {**text, "model_type": "glm4v_text"},
            "vision_config": {**tower, "model_type": "glm4v_vision"},
        }
        return hf.Glm46VForConditionalGeneration(hf.Glm46VConfig(**towers, **MARKS))
    if kind == "glm4v":
        return hf.Glm4vForConditionalGeneration(hf.Glm4vConfig(text_config=text, vision_config=tower, **MARKS))
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    text |= {**experts, "first_k_dense_replace": 1, "head_dim": 12, "n_group": 1, "topk_group": 1}
    return hf.Glm4vMoeForConditionalGeneration(hf.Glm4vMoeConfig(text_config=text, vision_config=tower, **MARKS))


def ernie4_5_vl(vision: Vision) -> Any:
    """`text_hidden` and `text_eps` are of the language model: the resampler's output and its last norm."""
    tower = {"depth": 3, "hidden_size": 64, "intermediate_size": 100, "num_heads": 4, **vision}
    experts = {"moe_intermediate_size": [8, 8], "moe_k": 1, "moe_num_experts": 2, "moe_num_shared_experts": 1}
    size = {"hidden_size": tower.pop("text_hidden", 24), "rms_norm_eps": tower.pop("text_eps", 1e-5)}
    heads = {"num_attention_heads": size["hidden_size"] // 12, "num_key_value_heads": 1}
    text = {**TEXT, **experts, **size, **heads, "num_hidden_layers": 2, "pad_token_id": 0, "intermediate_size": 32}
    config = hf.Ernie4_5_VLMoeConfig(text_config=text, vision_config=tower, **MARKS)
    return hf.Ernie4_5_VLMoeForConditionalGeneration(config)


def gemma4(vision: Vision) -> Any:
    """`text_hidden` is the width of the language model: that of the rows."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 12, "position_embedding_size": 1024}
    tower = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, **heads, **vision}
    text = {
        "vocab_size": 64, "hidden_size": tower.pop("text_hidden", 24), "intermediate_size": 32,
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 8,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64,
    }  # fmt: skip
    marks = {"image_token_id": 60, "video_token_id": 61, "audio_token_id": 62, "boi_token_id": 58, "eoi_token_id": 59}
    config = hf.Gemma4Config(text_config=text, vision_config=tower, audio_config=None, **marks)
    return hf.Gemma4ForConditionalGeneration(config)


def gemma3(vision: Vision) -> Any:
    """`tokens` are those of an image, `text_hidden` is the width of the language model."""
    tower = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 112, "patch_size": 14, "vision_use_head": False, **vision,
    }  # fmt: skip
    text = {
        "vocab_size": 64, "hidden_size": tower.pop("text_hidden", 24), "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 16,
    }  # fmt: skip
    marks = {"boi_token_index": 58, "eoi_token_index": 59, "image_token_index": 60}
    tokens = tower.pop("tokens", 4)
    config = hf.Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=tokens, **marks)
    return hf.Gemma3ForConditionalGeneration(config)


def internvl(vision: Vision) -> Any:
    """`text_hidden` is the width of the language model, `layer` the one whose output is taken."""
    tower = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
        "image_size": (56, 56), "patch_size": (14, 14), "attention_bias": True, **vision,
    }  # fmt: skip
    text = {
        "model_type": "qwen2", "vocab_size": 64, "hidden_size": tower.pop("text_hidden", 24), "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    layer = tower.pop("layer", -1)
    config = hf.InternVLConfig(
        text_config=text, vision_config=tower, image_token_id=60, image_seq_length=4, vision_feature_layer=layer
    )
    return hf.InternVLForConditionalGeneration(config)


def llama4(vision: Vision) -> Any:
    """`text_hidden` is the width of the language model."""
    tower = {
        "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": 56, "patch_size": 14, "projector_input_dim": 20, "projector_output_dim": 20,
        "vision_output_dim": 20, **vision,
    }  # fmt: skip
    text = {
        "vocab_size": 64, "hidden_size": tower.pop("text_hidden", 24), "intermediate_size": 16,
        "intermediate_size_mlp": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 12, "num_local_experts": 2, "pad_token_id": 0,
    }  # fmt: skip
    return hf.Llama4ForConditionalGeneration(
        hf.Llama4Config(text_config=text, vision_config=tower, image_token_index=60)
    )


QWEN = hf.Qwen2VLImageProcessorPil
INTERNVL = TinyModel(
    internvl, hf.GotOcr2ImageProcessorPil, patch=14, temporal=1, side=56,
    settings={"size": {"height": 56, "width": 56}}, as_is={"do_resize": False, "crop_to_patches": False},
)  # fmt: skip
TINY: dict[str, TinyModel] = {
    "qwen2_vl": TinyModel(qwen2_vl, QWEN, patch=14),
    "qwen2_5_vl": TinyModel(qwen2_5_vl, QWEN, patch=14),
    "qwen3_vl": TinyModel(qwen3_vl, QWEN, patch=16),
    "qwen3_vl_moe": TinyModel(lambda vision: qwen3_vl(vision, moe=True), QWEN, patch=16),
    "qwen3_5": TinyModel(qwen3_5, QWEN, patch=16),
    "qwen3_5_moe": TinyModel(lambda vision: qwen3_5(vision, moe=True), QWEN, patch=16),
    "glm4v": TinyModel(glm4v, hf.Glm4vImageProcessorPil, patch=14),
    "glm46v": TinyModel(lambda vision: glm4v(vision, kind="glm46v"), hf.Glm46VImageProcessorPil, patch=14),
    "glm4v_moe": TinyModel(lambda vision: glm4v(vision, kind="glm4v_moe"), hf.Glm4vImageProcessorPil, patch=14),
    "ernie4_5_vl_moe": TinyModel(ernie4_5_vl, hf.Ernie4_5_VLMoeImageProcessorPil, patch=14, temporal=1, fold=2),
    "gemma4": TinyModel(gemma4, hf.Gemma4ImageProcessorPil, patch=16, merge=3, temporal=1),
    "gemma3": TinyModel(
        gemma3, hf.Gemma3ImageProcessorPil, patch=14, merge=4, temporal=1, side=112,
        settings={"size": {"height": 112, "width": 112}},
    ),
    "internvl": INTERNVL,
    "internvl_chat": INTERNVL,
    "kimi_vl": TinyModel(None, None, patch=14, temporal=1),
    "llama4": TinyModel(
        llama4, None, patch=14, temporal=1, side=56, settings={"size": {"height": 56, "width": 56}}
    ),
}  # fmt: skip

GRIDS = tuple(name for name, tiny in TINY.items() if not tiny.side)
TILES = tuple(name for name, tiny in TINY.items() if tiny.side)
"""Architectures whose images are one grid of patches of their own size, and those whose images are square tiles."""
