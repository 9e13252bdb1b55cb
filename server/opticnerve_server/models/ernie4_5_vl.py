"""ERNIE-4.5-VL: the blocks of Qwen2-VL over single frames, then a resampler that folds two frames into a token.

Forward and numerics are those of transformers' Ernie4_5_VLMoeVisionTransformerPretrainedModel and
Ernie4_5_VLMoeVariableResolutionResamplerModel. A unit is a token of one frame: a still's is folded with itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from ..attention.base import AttentionBackend
from ..types import Capacity, ItemPlan
from .base import BufferSpec
from .config import GridConfig, ModelError, read_grid_config
from .grid import GridPlanner
from .grid_tower import Array, GridTower
from .layers import LayerNorm, Linear, PatchEmbed, RMSNorm, Rope, Segments, Stream
from .processor import COMMON, ProcessorClass
from .qwen2_vl import Block
from .weights import TensorSource

PROCESSOR = ProcessorClass(
    types=("Ernie4_5_VLMoeImageProcessor", "Ernie4_5_VL_MoeImageProcessor"),  # the second is its deprecated name
    defaults={**COMMON, "temporal_patch_size": 1, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 6177}},
)

FOLD = 2
"""Frames of a video that share their tokens; the official resampler knows no other number."""

ORIGINAL_KEYS = {"spatial_conv_size": "spatial_merge_size", "temporal_conv_size": "temporal_merge_size"}
"""Keys that the original configuration has at its top, and their names in transformers' vision_config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ernie45VLConfig(GridConfig):
    """`vision_config` with the class defaults of Ernie4_5_VLMoeVisionConfig, and what the resampler takes from the
    language model's.
    """

    KEYS: ClassVar[Mapping[str, str]] = {
        "out_hidden_size": "text_config.hidden_size",
        "text_norm_eps": "text_config.rms_norm_eps",
    }

    depth: int = 32
    hidden_size: int = 1280
    intermediate_size: int = 5120
    num_heads: int = 16
    out_hidden_size: int = 2560
    text_norm_eps: float = 1e-5
    hidden_act: str = "quick_gelu"
    patch_size: int = 14
    temporal_patch_size: int = 1
    temporal_merge_size: int = 2
    rms_norm_eps: float = 1e-6  # of the tower's LayerNorms, whatever its name

    def check(self) -> None:
        """See GridConfig."""
        GridConfig.check(self)
        self.check_activation("quick_gelu")
        for name, wanted in (("temporal_patch_size", 1), ("temporal_merge_size", FOLD)):
            if getattr(self, name) != wanted:
                raise ModelError(f"{self.key(name)} is {getattr(self, name)}, this family's is {wanted}")


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the resampler's two MLPs, normalised behind."""

    fc1: Linear
    fc2: Linear
    norm: LayerNorm

    @classmethod
    def take(cls, source: TensorSource, name: str, inputs: int, outputs: int, eps: float) -> Self:
        return cls(
            fc1=Linear.take(source, f"{name}.0", inputs, outputs),
            fc2=Linear.take(source, f"{name}.2", outputs, outputs),
            norm=LayerNorm.take(source, f"{name}.3", outputs, eps),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc2(F.gelu(self.fc1(x))))


class Ernie45VLTower(GridTower):
    """See `base.Tower`. A line is a unit, folded with its partner; those of a video's second frames are no rows."""

    config_class = Ernie45VLConfig
    processor_class = PROCESSOR
    fold = FOLD
    prefixes: ClassVar[Mapping[str, str]] = {"resampler_model.": "resampler_model.", "vision_model.": ""}

    def __init__(
        self, config: Ernie45VLConfig, planner: GridPlanner, source: TensorSource, backend: AttentionBackend
    ) -> None:
        """Take all weights from `source`. Raises ModelError for a missing or misshapen one."""
        super().__init__(planner, source)
        width, inner, heads, eps = config.hidden_size, config.intermediate_size, config.num_heads, config.rms_norm_eps
        self.patch_embed = PatchEmbed(source, planner, width, bias=False, flat=True)
        self.rope = Rope(config.head_dim, config.rope_theta, source.device)
        stream = Stream()
        self.blocks = [
            Block.take(source, f"blocks.{i}", width, inner, heads, backend, stream, eps) for i in range(config.depth)
        ]
        self.norm = stream.read_by(LayerNorm.take(source, "ln", width, eps))
        self.merged_size = merged = config.merged_size
        self.spatial = Stage.take(source, "resampler_model.spatial_linear", merged, merged, eps)
        self.temporal = Stage.take(source, "resampler_model.temporal_linear", FOLD * merged, merged, eps)
        self.proj = Linear.take(source, "resampler_model.mlp", merged, config.out_hidden_size)
        self.out_norm = RMSNorm.take(source, "resampler_model.after_norm", config.out_hidden_size, config.text_norm_eps)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Ernie45VLConfig:
        """See GridTower. Also reads the original layout, whose language model's keys lie at the top."""
        if config.get("use_temporal_conv") is False:
            raise ModelError("use_temporal_conv is false, only towers that fold two frames into a token are supported")
        vision = config.get("vision_config")
        if isinstance(vision, Mapping):
            moved = {new: config[old] for old, new in ORIGINAL_KEYS.items() if old in config}
            if "mlp_ratio" in vision:
                width = vision.get("hidden_size", Ernie45VLConfig().hidden_size)
                moved["intermediate_size"] = int(width * vision["mlp_ratio"])
            config = {**config, "vision_config": {**moved, **vision}}
        return read_grid_config(Ernie45VLConfig, config)

    def buffers(self, path: str, capacity: Capacity) -> dict[str, BufferSpec]:
        """See `base.Tower.buffers`; adds the unit that each is folded with."""
        return {"partner": BufferSpec((capacity.units,), "int32"), **super().buffers(path, capacity)}

    def fill(self, path: str, parts: Sequence[ItemPlan], out: Mapping[str, Array]) -> None:
        """See `base.Tower.fill`. Pad units are folded with the first."""
        super().fill(path, parts, out)
        begin = 0
        for part in parts:
            units, frames = part.paths[path].units, part.grid[0]
            partner = np.arange(begin, begin + units, dtype=np.int32).reshape(frames, -1)
            if frames > 1:
                partner[::FOLD] = partner[1::FOLD]
            out["partner"][begin : begin + units] = partner.ravel()
            begin += units

    def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        """See `base.Tower.forward`: [units, out_hidden_size]."""
        x = self.patch_embed(buffers)
        turns = self.rope.turns(buffers["position"])
        segments = Segments(buffers["cu_frames"], capacity.longest)
        for block in self.blocks:
            block(x, turns, segments)
        units = self.spatial(self.norm(x).view(-1, self.merged_size))
        folded = torch.cat([units, units.index_select(0, buffers["partner"])], dim=-1)
        return self.out_norm(self.proj(self.temporal(folded)))

    def gather_index(self, parts: Sequence[ItemPlan], lines: Mapping[str, int]) -> npt.NDArray[np.int32]:
        """See `base.Tower.gather_index`: the lines of first frames."""
        index, begin = [np.zeros(0, np.int32)], 0
        for part in parts:
            units = sum(plan.units for plan in part.paths.values())
            line = np.arange(begin, begin + units, dtype=np.int32).reshape(part.grid[0], -1)
            index.append(line[::FOLD].ravel())
            begin += units
        return np.concatenate(index)
