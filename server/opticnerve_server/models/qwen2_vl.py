"""Qwen2-VL: full attention within frames, no position table, LayerNorm, and an MLP of one quick GELU.

Forward and numerics are those of transformers' Qwen2VisionTransformerPretrainedModel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F

from .. import kernels
from ..attention.base import AttentionBackend
from ..types import Capacity
from .config import GridConfig
from .grid import GridPlanner
from .grid_tower import GridTower
from .layers import LayerNorm, Linear, PatchEmbed, Rope, Segments, SelfAttention, Stream
from .weights import TensorSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2VLConfig(GridConfig):
    """`vision_config` with the class defaults of Qwen2VLVisionConfig, whose `hidden_size` is the language model's."""

    KEYS: ClassVar[Mapping[str, str]] = {"hidden_size": "embed_dim", "out_hidden_size": "hidden_size"}

    depth: int = 32
    hidden_size: int = 1280
    mlp_ratio: int = 4
    num_heads: int = 16
    out_hidden_size: int = 3584
    hidden_act: str = "quick_gelu"
    patch_size: int = 14

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP."""
        return self.hidden_size * self.mlp_ratio

    def check(self) -> None:
        """See GridConfig."""
        GridConfig.check(self)
        self.check_activation("quick_gelu")


@dataclass(frozen=True, slots=True)
class Block:
    """Pre-norm residual attention and MLP."""

    norm1: LayerNorm
    attention: SelfAttention
    norm2: LayerNorm
    fc1: Linear
    fc2: Linear

    @classmethod
    def take(
        cls,
        source: TensorSource,
        name: str,
        width: int,
        inner: int,
        heads: int,
        backend: AttentionBackend,
        stream: Stream,
        eps: float,
    ) -> Self:
        return cls(
            norm1=stream.read_by(LayerNorm.take(source, f"{name}.norm1", width, eps)),
            attention=SelfAttention.take(source, f"{name}.attn", width, heads, backend, stream),
            norm2=stream.read_by(LayerNorm.take(source, f"{name}.norm2", width, eps)),
            fc1=Linear.take(source, f"{name}.mlp.fc1", width, inner),
            fc2=stream.joined_by(Linear.take(source, f"{name}.mlp.fc2", inner, width)),
        )

    def __call__(self, x: torch.Tensor, turns: torch.Tensor, segments: Segments) -> None:
        """Add to `x` where it lies."""
        self.attention.onto(x, self.norm1(x), turns, segments)
        self.fc2.onto(x, kernels.quick_gelu(self.fc1(self.norm2(x))))


class Qwen2VLTower(GridTower):
    """See `base.Tower`. Lines are tokens in the order of the items."""

    config_class = Qwen2VLConfig

    def __init__(
        self, config: Qwen2VLConfig, planner: GridPlanner, source: TensorSource, backend: AttentionBackend
    ) -> None:
        """Take all weights from `source`. Raises ModelError for a missing or misshapen one."""
        super().__init__(planner, source)
        width, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads
        self.patch_embed = PatchEmbed(source, planner, width, bias=False)
        self.rope = Rope(config.head_dim, config.rope_theta, source.device)
        stream = Stream()
        self.blocks = [
            Block.take(source, f"blocks.{i}", width, inner, heads, backend, stream, eps=1e-6)
            for i in range(config.depth)
        ]
        self.merged_size = config.merged_size
        self.merger_norm = stream.read_by(LayerNorm.take(source, "merger.ln_q", width))
        self.merger_fc1 = Linear.take(source, "merger.mlp.0", config.merged_size, config.merged_size)
        self.merger_fc2 = Linear.take(source, "merger.mlp.2", config.merged_size, config.out_hidden_size)

    def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        """See `base.Tower.forward`: [units, out_hidden_size]."""
        x = self.patch_embed(buffers)
        turns = self.rope.turns(buffers["position"])
        segments = Segments(buffers["cu_frames"], capacity.longest)
        for block in self.blocks:
            block(x, turns, segments)
        merged = self.merger_norm(x).view(-1, self.merged_size)
        return self.merger_fc2(F.gelu(self.merger_fc1(merged)))
