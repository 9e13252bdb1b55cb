"""transformers as the oracle: tiny random models with every parameter randomised, saved as real checkpoints are.

A default initialisation has zero biases and unit norms, which hide mistakes; here none is left. The pixels that the
oracle sees are normalised and cut into patches by the official image processor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from opticnerve_server.models.base import ImageItem, VideoItem
from opticnerve_server.models.presets import PROCESSORS
from opticnerve_server.types import ItemPlan, PathPlan
from tiny_models import TINY

transformers.utils.logging.disable_progress_bar()


def save_model(architecture: str, directory: Path, *, seed: int = 0, shard: str = "1GB", **vision: Any) -> None:
    """Save a random model with its image processor; `vision` overrides the tower's small configuration."""
    build = TINY[architecture].build
    assert build is not None
    model = build(vision)
    randomise(model, seed)
    model.save_pretrained(directory, max_shard_size=shard)
    settings = {**PROCESSORS[architecture], **TINY[architecture].settings}
    if TINY[architecture].processor is None:
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
        return
    settings.pop("image_processor_type")
    TINY[architecture].processor(**settings).save_pretrained(directory)


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Norm weights around 1, biases around 0, linear layers that keep the size of their input, tables of about 1.

    Stored buffers too: Gemma 4's bounds clip a few values in a hundred, its standardisation is like a norm.
    """
    generator = torch.Generator().manual_seed(seed)
    stored = model.state_dict()
    tensors = [*model.named_parameters(), *((name, b) for name, b in model.named_buffers() if name in stored)]
    for name, tensor in tensors:
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("_table"):
            tensor.data = noise
        elif tensor.ndim > 1:
            tensor.data = noise / math.sqrt(tensor[0].numel())
        elif name.endswith(("_min", "_max")):
            tensor.data = (2 + 0.2 * noise) * (-1 if name.endswith("_min") else 1)
        else:
            tensor.data = 1 + 0.2 * noise if name.endswith(("weight", "_scale")) else 0.2 * noise


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
    t: int,
    h: int,
    w: int,
    *,
    patch: int,
    seed: int,
    merge: int = 2,
    temporal: int = 2,
    fold: int = 1,
    odd: bool = False,
) -> Media:
    """Noise of t groups of h x w patches; t = 1 is a still. An `odd` video lacks the last frame of its last group."""
    frames = 1 if t == 1 else t * temporal - odd
    shape = (frames, h * patch, w * patch, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return media_of(pixels, t, patch=patch, merge=merge, fold=fold)


def media_of(frames: npt.NDArray[np.uint8], t: int = 1, *, patch: int, merge: int = 2, fold: int = 1) -> Media:
    """Frames [frames, height, width, 3] of a size in whole tokens, t groups; `fold` groups of a video share a token."""
    _, height, width, _ = frames.shape
    h, w = height // patch, width // patch
    units = t * h * w // merge**2
    path = PathPlan(units=units, segments=t, longest=h * w, pixel_bytes=frames.nbytes)
    kind, tokens = ("image", units) if t == 1 else ("video", units // fold)
    plan = ItemPlan(kind, height, width, (t, h, w), merge, tokens, paths={"default": path}, spans=())
    return Media(plan, frames)


def media_for(architecture: str, t: int, h: int, w: int, *, seed: int, odd: bool = False) -> Media:
    """`random_media` of an architecture's published sizes of patches and tokens."""
    tiny = TINY[architecture]
    sizes = {"patch": tiny.patch, "merge": tiny.merge, "temporal": tiny.temporal, "fold": tiny.fold}
    return random_media(t, h, w, **sizes, seed=seed, odd=odd)


def tiled_media(planner: Any, height: int, width: int, *, seed: int) -> Media:
    """Noise of a size, as the tiles that a planner makes of it: frames [tiles, side, side, 3]."""
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    plan = planner.plan(ImageItem(height, width))
    tiles = np.empty(plan.pixel_bytes, np.uint8)
    planner.fill_pixels(image, plan, tiles)
    return Media(plan, tiles.reshape(-1, planner.side, planner.side, 3))


def media_from(planner: Any, item: ImageItem | VideoItem, media: Any) -> Media:
    """An image, or the frames of a video that are sampled, as a planner prepares them: frames are flat bytes."""
    plan = planner.plan(item)
    pixels = np.empty(plan.pixel_bytes, np.uint8)
    planner.fill_pixels(media, plan, pixels)
    return Media(plan, pixels)


def planned_media(planner: Any, item: ImageItem | VideoItem, *, seed: int) -> Media:
    """Noise of a size through any planner."""
    count = len(planner.plan(item).frame_indices) or 1
    noise = np.random.default_rng(seed).integers(0, 256, (count, item.height, item.width, 3), dtype=np.uint8)
    return media_from(planner, item, noise if isinstance(item, VideoItem) else noise[0])


def official_patches(architecture: str, directory: Path, media: Media) -> torch.Tensor:
    """`pixel_values` float32 [rows, 3 x temporal_patch x patch x patch] by the official processor.

    A video is put together from its frames' own patches, the last frame repeated where one is missing.
    """
    processor = TINY[architecture].processor.from_pretrained(directory)
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
    architecture = model.config.model_type
    if TINY[architecture].side:
        return _tile_rows(model, directory, batch)
    if architecture == "gemma4":
        return torch.cat([_gemma4_rows(model.model, directory, media) for media in batch])
    pixels = torch.cat([official_patches(architecture, directory, media) for media in batch])
    return grid_rows(model, pixels, torch.tensor([media.plan.grid for media in batch]))


@torch.inference_mode()
def grid_rows(model: Any, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Rows [tokens, width] of official patches, `grid` being int64 [items, 3]: main, then the DeepStack levels."""
    architecture, inner = model.config.model_type, model.model
    tower = inner.vision_tower if architecture == "ernie4_5_vl_moe" else inner.visual
    pixels = pixels.to(tower.dtype)
    if architecture == "ernie4_5_vl_moe":
        rows: torch.Tensor = inner.resampler_model(tower(pixels, grid_thw=grid).last_hidden_state, grid)
        return rows
    if architecture.startswith("glm"):  # this tower takes every group as a still, as its own video path does
        grid = grid.repeat_interleave(grid[:, 0], dim=0)
        grid[:, 0] = 1
    output = tower(pixels, grid_thw=grid)
    return torch.cat([output.pooler_output, *getattr(output, "deepstack_features", [])], dim=-1)


def _tile_rows(model: Any, directory: Path, batch: Sequence[Media]) -> torch.Tensor:
    """Rows of items whose frames are their tiles, each normalised by the official processor."""
    if model.config.model_type == "llama4":
        projected: torch.Tensor = model.multi_modal_projector(llama4_adapter_rows(model, batch))
        return projected
    tiny = TINY[model.config.model_type]
    tiles = [tile for media in batch for tile in media.frames]
    pixels = tiny.processor.from_pretrained(directory)(tiles, **tiny.as_is, return_tensors="pt").pixel_values
    rows: torch.Tensor = model.get_image_features(pixels.to(model.dtype)).pooler_output.flatten(0, 1)
    return rows


def llama4_pixels(batch: Sequence[Media]) -> torch.Tensor:
    """`pixel_values` bfloat16 [tiles, 3, side, side]: they are normalised in this format."""
    tiles = torch.from_numpy(np.concatenate([media.frames for media in batch])).permute(0, 3, 1, 2)
    return (tiles.to(torch.bfloat16) * (1 / 255) - 0.5) / 0.5


@torch.inference_mode()
def llama4_adapter_rows(model: Any, batch: Sequence[Media]) -> torch.Tensor:
    """Rows [tokens, projector_output_dim] of the official tower, whose output is that of the adapter."""
    rows: torch.Tensor = model.get_image_features(llama4_pixels(batch).to(model.dtype)).last_hidden_state
    return rows.flatten(0, 1)


def _gemma4_rows(inner: Any, directory: Path, media: Media) -> torch.Tensor:
    """A video's frames are embedded as stills, padded to 1260 patches; the last one stands for one that is missing."""
    processor = TINY["gemma4"].processor.from_pretrained(directory)
    frames = [media.frames[min(i, len(media.frames) - 1)] for i in range(media.plan.grid[0])]
    inputs = processor(frames, do_resize=False, max_soft_tokens=140, return_tensors="pt")
    pixels, position = inputs["pixel_values"], inputs["image_position_ids"]
    return torch.cat(inner.get_image_features(pixels, position).pooler_output)
