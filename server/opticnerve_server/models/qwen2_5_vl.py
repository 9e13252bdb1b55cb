"""Qwen2.5-VL: attention within windows in most layers and within frames in a few, RMSNorm, SwiGLU.

Forward and numerics are those of transformers' Qwen2_5_VisionTransformerPretrainedModel. Rows are staged in the order
of the windows, frame by frame, so that windows and frames are both contiguous; only the final gather undoes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from ..attention.base import AttentionBackend
from ..types import Capacity
from .config import GridConfig, ModelError
from .grid import GridPlanner
from .grid_tower import Frame, GridTower
from .layers import Linear, PatchEmbed, RMSNorm, Rope, Segments, SelfAttention, Stream, SwiGLU
from .weights import TensorSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen25VLConfig(GridConfig):
    """`vision_config` with the class defaults of Qwen2_5_VLVisionConfig; no published tower has its hidden_size."""

    depth: int = 32
    hidden_size: int = 3584
    intermediate_size: int = 3420
    num_heads: int = 16
    out_hidden_size: int = 3584
    hidden_act: str = "silu"
    patch_size: int = 14
    window_size: int = 112
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)

    @property
    def window_side(self) -> int:
        """Tokens along a side of a window."""
        return self.window_size // self.spatial_merge_size // self.patch_size

    def check(self) -> None:
        """See GridConfig."""
        GridConfig.check(self)
        self.check_activation("silu")
        if self.window_side < 1:
            raise ModelError(
                f"vision_config.window_size {self.window_size} is below a token of "
                f"{self.spatial_merge_size} x {self.patch_size} pixels"
            )


@dataclass(frozen=True, slots=True)
class Block:
    """Pre-norm residual attention and SwiGLU."""

    norm1: RMSNorm
    attention: SelfAttention
    norm2: RMSNorm
    mlp: SwiGLU

    @classmethod
    def take(
        cls, source: TensorSource, name: str, config: Qwen25VLConfig, backend: AttentionBackend, stream: Stream
    ) -> Self:
        width, inner = config.hidden_size, config.intermediate_size
        return cls(
            norm1=stream.read_by(RMSNorm.take(source, f"{name}.norm1", width)),
            attention=SelfAttention.take(source, f"{name}.attn", width, config.num_heads, backend, stream),
            norm2=stream.read_by(RMSNorm.take(source, f"{name}.norm2", width)),
            mlp=SwiGLU.take(source, f"{name}.mlp", width, inner, bias=True, stream=stream),
        )

    def __call__(self, x: torch.Tensor, turns: torch.Tensor, segments: Segments) -> None:
        """Add to `x` where it lies."""
        self.attention.onto(x, self.norm1(x), turns, segments)
        self.mlp.onto(x, self.norm2(x))


class Qwen25VLTower(GridTower):
    """See `base.Tower`. Lines are tokens in the order of the windows."""

    config_class = Qwen25VLConfig

    def __init__(
        self, config: Qwen25VLConfig, planner: GridPlanner, source: TensorSource, backend: AttentionBackend
    ) -> None:
        """Take all weights from `source`. Raises ModelError for a missing or misshapen one."""
        super().__init__(planner, source)
        self.window_side = config.window_side
        self.full_layers = frozenset(config.fullatt_block_indexes)
        self.patch_embed = PatchEmbed(source, planner, config.hidden_size, bias=False)
        self.rope = Rope(config.head_dim, config.rope_theta, source.device)
        stream = Stream()
        self.blocks = [Block.take(source, f"blocks.{i}", config, backend, stream) for i in range(config.depth)]
        self.merged_size = config.merged_size
        self.merger_norm = stream.read_by(RMSNorm.take(source, "merger.ln_q", config.hidden_size))
        self.merger_fc1 = Linear.take(source, "merger.mlp.0", config.merged_size, config.merged_size)
        self.merger_fc2 = Linear.take(source, "merger.mlp.2", config.merged_size, config.out_hidden_size)

    def segment_buffers(self, capacity: Capacity) -> dict[str, int]:
        """See `GridTower.segment_buffers`.

        A frame of a x b tokens has ceil(a/s) ceil(b/s) windows of side s, at most (ab + s - 1) / s (one-row strips).
        """
        windows = (capacity.units + (self.window_side - 1) * capacity.segments) // self.window_side
        return {**super().segment_buffers(capacity), "cu_windows": windows}

    def frame(self, h: int, w: int) -> Frame:
        """See `GridTower.frame`; tokens in the order of the windows."""
        frame = super().frame(h, w)
        merge = self.planner.merge
        order, lengths = _window_order(h // merge, w // merge, self.window_side)
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order), dtype=np.int32)
        rows = (order[:, None] * merge**2 + np.arange(merge**2, dtype=np.int32)).ravel()
        return Frame(
            rows={name: array[rows] for name, array in frame.rows.items()},
            segments={**frame.segments, "cu_windows": lengths * merge**2},
            inverse=inverse,
        )

    def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        """See `base.Tower.forward`: [units, out_hidden_size]."""
        x = self.patch_embed(buffers)
        turns = self.rope.turns(buffers["position"])
        window_rows = (self.window_side * self.planner.merge) ** 2
        frames = Segments(buffers["cu_frames"], capacity.longest)
        windows = Segments(buffers["cu_windows"], min(window_rows, capacity.longest))
        for i, block in enumerate(self.blocks):
            block(x, turns, frames if i in self.full_layers else windows)
        merged = self.merger_norm(x).view(-1, self.merged_size)
        return self.merger_fc2(F.gelu(self.merger_fc1(merged)))


def _window_order(rows: int, columns: int, side: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The tokens of a rows x columns frame window by window, int32 [tokens], and the tokens of each window.

    Windows of side x side tile the frame from its top left; those at the right and bottom edges are partial. Windows go
    from left to right and top to bottom, and so do tokens within one.
    """
    across = -(-columns // side)
    row, column = np.arange(rows)[:, None], np.arange(columns)[None, :]
    window = (row // side * across + column // side).ravel()
    order = np.argsort(window, kind="stable").astype(np.int32)
    return order, np.bincount(window).astype(np.int32)
