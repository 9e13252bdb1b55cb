"""Small random models that a whole vLLM loads: weights, tokenizer, processor, chat template, all made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
IDS = {token: 256 + index for index, token in enumerate(SPECIAL)}
TEXT = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # one that vLLM's attention on a CPU has
    "max_position_embeddings": 4096,
    "bos_token_id": IDS["<|endoftext|>"],
    "eos_token_id": IDS["<|im_end|>"],
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
}
TOKENS = {
    "image_token_id": IDS["<|image_pad|>"],
    "video_token_id": IDS["<|video_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"],
}
VISION = {"depth": 4, "hidden_size": 128, "intermediate_size": 200, "num_heads": 4, "out_hidden_size": 128}
PATCH = {"qwen2_5_vl": 14, "qwen3_vl": 16}
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type == 'text' %}{{ part.text }}
{%- elif 'image' in part.type %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'video' in part.type %}<|vision_start|><|video_pad|><|vision_end|>
{%- endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


def save_vllm_model(architecture: str, directory: Path) -> None:
    """Writes "qwen2_5_vl" or "qwen3_vl" with every weight random; float32."""
    torch.manual_seed(7)
    model = _MODELS[architecture]()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.05 if parameter.ndim > 1 else 0.02
            parameter.add_(scale * torch.randn_like(parameter))
        model.lm_head.weight.mul_(8)  # far between the best token and the second
    model.save_pretrained(directory)
    _save_tokenizer(directory)
    _save_processor(architecture, directory)


def _qwen2_5_vl() -> Any:
    vision = {**VISION, "window_size": 112, "fullatt_block_indexes": [1, 3]}
    return hf.Qwen2_5_VLForConditionalGeneration(hf.Qwen2_5_VLConfig(text_config=TEXT, vision_config=vision, **TOKENS))


def _qwen3_vl() -> Any:
    vision = {**VISION, "num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1, 2]}
    return hf.Qwen3VLForConditionalGeneration(hf.Qwen3VLConfig(text_config=TEXT, vision_config=vision, **TOKENS))


_MODELS = {"qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl}


def _save_tokenizer(directory: Path) -> None:
    """A byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    wrapped = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(directory)


def _save_processor(architecture: str, directory: Path) -> None:
    three = architecture == "qwen3_vl"
    mean = [0.5] * 3 if three else [0.48145466, 0.4578275, 0.40821073]
    deviation = [0.5] * 3 if three else [0.26862954, 0.26130258, 0.27577711]
    side = PATCH[architecture] * 2
    images = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 4 * side**2, "longest_edge": 256 * side**2},
        "patch_size": PATCH[architecture],
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": mean,
        "image_std": deviation,
    }
    kind = "Qwen3VL" if three else "Qwen2VL"
    videos = {key: value for key, value in images.items() if key != "image_processor_type"}
    videos |= {
        "video_processor_type": f"{kind}VideoProcessor",
        "size": {"shortest_edge": 4 * side**2, "longest_edge": 4096 * side**2},
    }
    processor = "Qwen3VLProcessor" if three else "Qwen2_5_VLProcessor"
    for name, settings in (("preprocessor_config", images), ("video_preprocessor_config", videos)):
        text = json.dumps({**settings, "processor_class": processor}, indent=1)
        (directory / f"{name}.json").write_text(text)
