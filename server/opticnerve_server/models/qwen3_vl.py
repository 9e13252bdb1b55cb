"""Qwen3-VL, Qwen3.5 and Qwen3.6, dense and MoE: full attention within frames, an interpolated position table, and in
Qwen3-VL DeepStack.

Forward and numerics are those of transformers' Qwen3VLVisionModel and Qwen3_5VisionModel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from .. import kernels
from ..attention.base import AttentionBackend
from ..types import Capacity
from .base import BufferSpec
from .config import GridConfig, ModelError
from .grid import GridPlanner
from .grid_tower import Frame, GridTower
from .layers import GeluMLP, LayerNorm, Linear, PatchEmbed, Rope, Segments, SelfAttention, Stream
from .weights import TensorSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VLConfig(GridConfig):
    """`vision_config` with the class defaults of Qwen3VLVisionConfig."""

    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_heads: int = 16
    out_hidden_size: int = 3584
    hidden_act: str = "gelu_pytorch_tanh"
    patch_size: int = 16
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)

    @property
    def table_side(self) -> int:
        """Rows and columns of the position table."""
        return math.isqrt(self.num_position_embeddings)

    @property
    def deepstack_levels(self) -> int:
        """See GridConfig."""
        return len(self.deepstack_visual_indexes)

    def check(self) -> None:
        """See GridConfig."""
        GridConfig.check(self)
        self.check_activation("gelu_pytorch_tanh")
        layers = self.deepstack_visual_indexes
        if len(set(layers)) != len(layers) or not all(0 <= layer < self.depth for layer in layers):
            raise ModelError(
                f"vision_config.deepstack_visual_indexes is {list(layers)}, must be different layers below depth "
                f"{self.depth}"
            )
        if self.table_side**2 != self.num_position_embeddings:
            raise ModelError(
                f"vision_config.num_position_embeddings is {self.num_position_embeddings}, must be a square"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Config(Qwen3VLConfig):
    """`vision_config` with the class defaults of Qwen3_5VisionConfig, which has no DeepStack; published files name its
    empty list of layers all the same.
    """

    deepstack_visual_indexes: tuple[int, ...] = ()

    def check(self) -> None:
        """See GridConfig."""
        Qwen3VLConfig.check(self)
        if self.deepstack_visual_indexes:
            raise ModelError(
                f"vision_config.deepstack_visual_indexes is {list(self.deepstack_visual_indexes)}, this family has none"
            )


@dataclass(frozen=True, slots=True)
class Block:
    """Pre-norm residual attention and MLP."""

    norm1: LayerNorm
    attention: SelfAttention
    norm2: LayerNorm
    mlp: GeluMLP

    @classmethod
    def take(
        cls, source: TensorSource, name: str, config: Qwen3VLConfig, backend: AttentionBackend, stream: Stream
    ) -> Self:
        width, layers = config.hidden_size, (f"{name}.mlp.linear_fc1", f"{name}.mlp.linear_fc2")
        return cls(
            norm1=stream.read_by(LayerNorm.take(source, f"{name}.norm1", width)),
            attention=SelfAttention.take(source, f"{name}.attn", width, config.num_heads, backend, stream),
            norm2=stream.read_by(LayerNorm.take(source, f"{name}.norm2", width)),
            mlp=GeluMLP.take(source, layers, width, config.intermediate_size, stream),
        )

    def __call__(self, x: torch.Tensor, turns: torch.Tensor, segments: Segments) -> None:
        """Add to `x` where it lies."""
        self.attention.onto(x, self.norm1(x), turns, segments)
        self.mlp.onto(x, self.norm2(x))


@dataclass(frozen=True, slots=True)
class Merger:
    """The patches of a token, side by side, to one row. The norm is over patches (main) or over tokens (DeepStack)."""

    norm: LayerNorm
    fc1: Linear
    fc2: Linear

    @classmethod
    def take(cls, source: TensorSource, name: str, config: Qwen3VLConfig, stream: Stream, *, norm_size: int) -> Self:
        merged = config.merged_size
        return cls(
            norm=stream.read_by(LayerNorm.take(source, f"{name}.norm", norm_size)),
            fc1=Linear.take(source, f"{name}.linear_fc1", merged, merged),
            fc2=Linear.take(source, f"{name}.linear_fc2", merged, config.out_hidden_size),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x.view(-1, self.norm.weight.shape[0]))
        return self.fc2(F.gelu(self.fc1(normed.view(-1, self.fc1.weight.shape[1]))))


class Qwen3VLTower(GridTower):
    """See `base.Tower`. A line is [main, level 0, level 1, ...], the levels in the order of their blocks."""

    config_class = Qwen3VLConfig

    def __init__(
        self, config: Qwen3VLConfig, planner: GridPlanner, source: TensorSource, backend: AttentionBackend
    ) -> None:
        """Take all weights from `source`. Raises ModelError for a missing or misshapen one."""
        super().__init__(planner, source)
        self.row_buffers = {
            **self.row_buffers,
            "taps": BufferSpec((4,), "int32"),
            "weights": BufferSpec((4,), "float32"),
        }
        self.table_side = config.table_side
        self.patch_embed = PatchEmbed(source, planner, config.hidden_size, bias=True)
        table = source.take("pos_embed.weight", config.num_position_embeddings, config.hidden_size)
        self.position_table = table.float()  # interpolated in float32, from values of the tower's dtype
        self.rope = Rope(config.head_dim, config.rope_theta, source.device)
        self.blocks: list[Block] = []
        self.deepstack: dict[int, Merger] = {}
        stream, levels = Stream(), config.deepstack_visual_indexes
        for i in range(config.depth):
            self.blocks.append(Block.take(source, f"blocks.{i}", config, backend, stream))
            if i in levels:
                name = f"deepstack_merger_list.{levels.index(i)}"
                self.deepstack[i] = Merger.take(source, name, config, stream, norm_size=config.merged_size)
        self.merger = Merger.take(source, "merger", config, stream, norm_size=config.hidden_size)

    def frame(self, h: int, w: int) -> Frame:
        """See `GridTower.frame`; adds where each patch lies in the position table."""
        frame = super().frame(h, w)
        taps, weights = _interpolation(frame.rows["position"], h, w, self.table_side)
        return replace(frame, rows={**frame.rows, "taps": taps, "weights": weights})

    def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        """See `base.Tower.forward`: [units, out_hidden_size x (1 + levels)]."""
        x = self.patch_embed(buffers)
        x = kernels.add_taps(x, self.position_table, buffers["taps"], buffers["weights"])
        turns = self.rope.turns(buffers["position"])
        segments = Segments(buffers["cu_frames"], capacity.longest)
        levels: list[torch.Tensor] = []
        for i, block in enumerate(self.blocks):
            block(x, turns, segments)
            if i in self.deepstack:
                levels.append(self.deepstack[i](x))
        return torch.cat([self.merger(x), *levels], dim=-1)


class Qwen35Tower(Qwen3VLTower):
    """See `base.Tower`. The Qwen3-VL tower without DeepStack."""

    config_class = Qwen35Config


def _interpolation(
    position: npt.NDArray[np.generic], h: int, w: int, side: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Bilinear taps int32 [rows, 4] into a table of side x side, and their float32 weights; corners are aligned."""
    last = np.array([max(h - 1, 1), max(w - 1, 1)], np.float32)
    exact = position.astype(np.float32) * np.float32(side - 1) / last
    low = exact.astype(np.int32)
    high = np.minimum(low + 1, side - 1)
    dy, dx = (exact - low).T.astype(np.float32)
    taps = [low[:, 0] * side + low[:, 1], low[:, 0] * side + high[:, 1]]
    taps += [high[:, 0] * side + low[:, 1], high[:, 0] * side + high[:, 1]]
    weights = [(1 - dy) * (1 - dx), (1 - dy) * dx, dy * (1 - dx), dy * dx]
    return np.stack(taps, axis=1), np.stack(weights, axis=1)
