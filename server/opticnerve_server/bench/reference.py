"""transformers' own vision model beside ours: the same weights, the same pixels, eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..models.registry import ModelSource
from ..types import ItemPlan
from .batches import random_pixels
from .build import RecordingTensors
from .timing import host_times

Reference = Callable[..., torch.Tensor]
"""(pixel_values, grid_thw) to rows [tokens, width]."""


def reference(source: ModelSource, tensors: RecordingTensors) -> Reference:
    """The vision model of transformers with the same weights."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(**source.config)
    with torch.device("meta"):  # the whole model without its memory, to learn the class of its tower
        cls = type(AutoModelForImageTextToText.from_config(config).model.visual)  # type: ignore[no-untyped-call]
    with torch.device(tensors.device):
        model = cls._from_config(config.vision_config, attn_implementation="sdpa")
    # Cast parameters one by one: `model.to(dtype)` would round the float32 rope frequencies as well.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(tensors.dtype)
    model.load_state_dict(tensors.taken)
    model.eval()

    def run(pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        output = model(pixel_values, grid_thw=grid_thw)
        return torch.cat([output.pooler_output, *(getattr(output, "deepstack_features", None) or [])], dim=-1)

    return run


def official_patches(planner: Any, plan: ItemPlan, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """pixel_values of one item as the official processor lays them out, [rows, 3 * temporal_patch * patch^2]."""
    p, m, pair = planner.patch, planner.merge, planner.temporal_patch
    frames = pixels.reshape(-1, plan.height, plan.width, 3)
    frames = np.concatenate([frames, np.repeat(frames[-1:], plan.grid[0] * pair - len(frames), axis=0)])
    scaled = (frames - np.float32(255) * np.array(planner.mean, np.float32)) / (
        np.float32(255) * np.array(planner.std, np.float32)
    )
    t, h, w = plan.grid
    cut = scaled.reshape(t, pair, h // m, m, p, w // m, m, p, 3).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    patches: npt.NDArray[np.float32] = cut.reshape(t * h * w, -1)
    return patches


def measure_reference(
    run: Reference, planner: Any, plans: Sequence[ItemPlan], device: torch.device, repeats: int
) -> tuple[float, torch.Tensor]:
    """Median milliseconds of the reference and its rows."""
    pairs = zip(plans, random_pixels(plans), strict=True)
    patches = np.concatenate([official_patches(planner, plan, pixels) for plan, pixels in pairs])
    pixel_values = torch.from_numpy(patches).to(device)
    grid = torch.tensor([plan.grid for plan in plans], device=device)

    median = host_times(lambda: run(pixel_values, grid), device, repeats).median
    return median, run(pixel_values, grid).cpu()
