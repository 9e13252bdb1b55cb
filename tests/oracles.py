"""transformers as the oracle: tiny random models with every parameter randomised, saved as real checkpoints are.

A default initialisation has zero biases and unit norms, which hide mistakes; here none is left. The pixels that the
oracle sees are normalised and cut into patches by the official image processor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from opticnerve_server.models.presets import PROCESSORS
from opticnerve_server.types import ItemPlan, PathPlan

transformers.utils.logging.disable_progress_bar()

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
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def save_model(architecture: str, directory: Path, *, seed: int = 0, shard: str = "1GB", **vision: Any) -> None:
    """Save a random model with its image processor; `vision` overrides the tower's small configuration."""
    if architecture == "qwen2_5_vl":
        tower = {**VISION, "intermediate_size": 84, "fullatt_block_indexes": [1, 3], **vision}
        config: Any = Qwen2_5_VLConfig(text_config=TEXT, vision_config=tower, **TOKENS)
        model: Any = Qwen2_5_VLForConditionalGeneration(config)
    else:
        tower = {**VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2, 3], **vision}
        moe = architecture == "qwen3_vl_moe"
        text = {**TEXT, "head_dim": 12, **(EXPERTS if moe else {})}
        config = (Qwen3VLMoeConfig if moe else Qwen3VLConfig)(text_config=text, vision_config=tower, **TOKENS)
        model = (Qwen3VLMoeForConditionalGeneration if moe else Qwen3VLForConditionalGeneration)(config)
    randomise(model, seed)
    model.save_pretrained(directory, max_shard_size=shard)
    settings = {key: value for key, value in PROCESSORS[architecture].items() if key != "image_processor_type"}
    Qwen2VLImageProcessorPil(**settings).save_pretrained(directory)


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Norm weights around 1, biases around 0, linear layers that keep the size of their input."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.data = noise / math.sqrt(parameter[0].numel())
        else:
            parameter.data = 1 + 0.2 * noise if name.endswith("weight") else 0.2 * noise


def load_model(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The saved model. `from_pretrained` and not `.to(dtype)`, which would round the rotary frequencies too."""
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=dtype)
    return model.eval()


@dataclass(frozen=True)
class Media:
    """An image (one frame, t = 1) or a video (frames uint8 [frames, height, width, 3]) of a size in whole tokens."""

    plan: ItemPlan
    frames: npt.NDArray[np.uint8]


def random_media(
    t: int, h: int, w: int, *, patch: int, seed: int, merge: int = 2, temporal: int = 2, odd: bool = False
) -> Media:
    """Noise of t groups of h x w patches; t = 1 is a still. An `odd` video lacks the last frame of its last group."""
    frames = 1 if t == 1 else t * temporal - odd
    height, width = h * patch, w * patch
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    tokens = t * h * w // merge**2
    path = PathPlan(units=tokens, segments=t, longest=h * w, pixel_bytes=pixels.nbytes)
    kind = "image" if t == 1 else "video"
    plan = ItemPlan(kind, height, width, (t, h, w), merge, tokens, paths={"default": path}, spans=())
    return Media(plan, pixels)


def official_patches(directory: Path, media: Media) -> torch.Tensor:
    """`pixel_values` float32 [rows, 3 x temporal_patch x patch x patch] by the official processor.

    A video is put together from its frames' own patches, the last frame repeated where one is missing.
    """
    processor = Qwen2VLImageProcessorPil.from_pretrained(directory)
    temporal, patch = processor.temporal_patch_size, processor.patch_size
    stills = [
        processor(frame, do_resize=False, return_tensors="pt").pixel_values.view(-1, 3, temporal, patch**2)[:, :, 0]
        for frame in media.frames
    ]
    groups = [
        torch.stack([stills[min(group * temporal + j, len(stills) - 1)] for j in range(temporal)], dim=2)
        for group in range(media.plan.grid[0])
    ]
    return torch.cat(groups).flatten(1)


@torch.inference_mode()
def oracle_rows(model: Any, directory: Path, batch: Sequence[Media]) -> torch.Tensor:
    """Rows [tokens, width] of a whole batch by the official tower: main, then the DeepStack levels."""
    tower = model.model.visual
    pixels = torch.cat([official_patches(directory, media) for media in batch]).to(tower.dtype)
    output = tower(pixels, grid_thw=torch.tensor([media.plan.grid for media in batch]))
    return torch.cat([output.pooler_output, *getattr(output, "deepstack_features", [])], dim=-1)
