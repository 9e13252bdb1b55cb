"""GLM-4.1V, GLM-4.5V and GLM-4.6V: full attention within frames, a bicubically resized position table, RMSNorm, SwiGLU.

Forward and numerics are those of transformers' Glm4vVisionModel, which GLM-4.5V and 4.6V share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F

from ..attention.base import AttentionBackend
from ..types import Capacity
from .config import GridConfig, ModelError
from .grid import ClipResize, GridPlanner
from .grid_tower import Frame, GridTower
from .layers import LayerNorm, Linear, PatchEmbed, RMSNorm, Rope, Segments, SelfAttention, Stream, SwiGLU
from .processor import COMMON, ProcessorClass
from .table import TablePositions
from .weights import TensorSource

PROCESSOR = ProcessorClass(
    types=("Glm4vImageProcessor", "Glm46VImageProcessor"),
    defaults={**COMMON, "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4vConfig(GridConfig):
    """`vision_config` with the class defaults of Glm4vVisionConfig."""

    depth: int = 24
    hidden_size: int = 1536
    intermediate_size: int = 13696  # of the merger; that of the blocks is out_hidden_size
    num_heads: int = 12
    out_hidden_size: int = 4096
    hidden_act: str = "silu"
    patch_size: int = 14
    image_size: int = 336
    attention_bias: bool = False
    rms_norm_eps: float = 1e-5

    @property
    def table_side(self) -> int:
        """Rows and columns of the position table."""
        return self.image_size // self.patch_size

    def check(self) -> None:
        """See GridConfig."""
        GridConfig.check(self)
        self.check_activation("silu")
        if self.table_side < 1:
            raise ModelError(f"vision_config.image_size {self.image_size} is below a patch of {self.patch_size} pixels")


@dataclass(frozen=True, slots=True)
class Block:
    """Pre-norm residual attention and SwiGLU."""

    norm1: RMSNorm
    attention: SelfAttention
    norm2: RMSNorm
    mlp: SwiGLU

    @classmethod
    def take(
        cls, source: TensorSource, name: str, config: Glm4vConfig, backend: AttentionBackend, stream: Stream
    ) -> Self:
        width, eps, biases = config.hidden_size, config.rms_norm_eps, {"qkv_bias": config.attention_bias}
        return cls(
            norm1=stream.read_by(RMSNorm.take(source, f"{name}.norm1", width, eps)),
            attention=SelfAttention.take(
                source, f"{name}.attn", width, config.num_heads, backend, stream, **biases, proj_bias=False
            ),
            norm2=stream.read_by(RMSNorm.take(source, f"{name}.norm2", width, eps)),
            mlp=SwiGLU.take(source, f"{name}.mlp", width, config.out_hidden_size, bias=False, stream=stream),
        )

    def __call__(self, x: torch.Tensor, turns: torch.Tensor, segments: Segments) -> None:
        """Add to `x` where it lies."""
        self.attention.onto(x, self.norm1(x), turns, segments)
        self.mlp.onto(x, self.norm2(x))


class Merger:
    """The patches of a token to one row: a convolution whose stride is its kernel, a projection, and a SwiGLU."""

    def __init__(self, source: TensorSource, config: Glm4vConfig) -> None:
        width, out, side = config.hidden_size, config.out_hidden_size, config.spatial_merge_size
        # Stored as (channel, row, column); the patches of a token lie one behind another as (row, column, channel).
        kernel = source.take("downsample.weight", out, width, side, side).permute(0, 2, 3, 1)
        self.downsample = Linear(kernel.reshape(out, -1).contiguous(), source.take("downsample.bias", out))
        self.proj = Linear.take(source, "merger.proj", out, out, bias=False)
        self.norm = LayerNorm.take(source, "merger.post_projection_norm", out, eps=1e-5)
        self.mlp = SwiGLU.take(source, "merger", out, config.intermediate_size, bias=False)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.downsample(x.view(-1, self.downsample.weight.shape[1]))
        return self.mlp(F.gelu(self.norm(self.proj(tokens))))


class Glm4vTower(GridTower):
    """See `base.Tower`. Lines are tokens in the order of the items."""

    config_class = Glm4vConfig
    processor_class = PROCESSOR
    resize_rule = ClipResize

    def __init__(
        self, config: Glm4vConfig, planner: GridPlanner, source: TensorSource, backend: AttentionBackend
    ) -> None:
        """Take all weights from `source`. Raises ModelError for a missing or misshapen one."""
        super().__init__(planner, source)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.patch_embed = PatchEmbed(source, planner, width, bias=True)
        self.patch_norm = RMSNorm.take(source, "post_conv_layernorm", width, eps)
        side = config.table_side
        self.positions = TablePositions(source.take("embeddings.position_embedding.weight", side**2, width), side)
        self.row_buffers = {**self.row_buffers, **self.positions.row_buffers}
        self.rope = Rope(config.head_dim, config.rope_theta, source.device)
        stream = Stream()
        self.blocks = [Block.take(source, f"blocks.{i}", config, backend, stream) for i in range(config.depth)]
        self.norm = stream.read_by(RMSNorm.take(source, "post_layernorm", width, eps))
        self.merger = Merger(source, config)

    def frame(self, h: int, w: int) -> Frame:
        """See `GridTower.frame`; adds where each patch lies in the position table."""
        frame = super().frame(h, w)
        return replace(frame, rows={**frame.rows, **self.positions.rows(h, w, frame.rows["position"])})

    def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        """See `base.Tower.forward`: [units, out_hidden_size]."""
        x = self.patch_norm(self.patch_embed(buffers))
        x = self.positions(x, buffers)
        turns = self.rope.turns(buffers["position"])
        segments = Segments(buffers["cu_frames"], capacity.longest)
        for block in self.blocks:
            block(x, turns, segments)
        return self.merger(self.norm(x))
