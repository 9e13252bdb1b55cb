"""The block of SigLIP's encoder, which Gemma 3 and MiniCPM-V have."""

from __future__ import annotations

import torch

from .. import kernels
from ..attention.base import AttentionBackend
from .layers import GeluMLP, LayerNorm, Linear, Segments
from .tile_tower import TileConfig
from .weights import TensorSource


class Block:
    """Pre-norm residual attention and MLP; the three projections of attention run as one."""

    def __init__(
        self, source: TensorSource, name: str, config: TileConfig, eps: float, backend: AttentionBackend
    ) -> None:
        width = config.hidden_size
        self.heads, self.backend = config.num_heads, backend
        self.norm1 = LayerNorm.take(source, f"{name}.layer_norm1", width, eps)
        self.qkv = Linear.joined(Linear.take(source, f"{name}.self_attn.{part}_proj", width, width) for part in "qkv")
        self.out = Linear.take(source, f"{name}.self_attn.out_proj", width, width)
        self.norm2 = LayerNorm.take(source, f"{name}.layer_norm2", width, eps)
        layers = f"{name}.mlp.fc1", f"{name}.mlp.fc2"
        self.mlp = GeluMLP.take(source, layers, width, config.intermediate_size)

    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None, segments: Segments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `layers.through`."""
        rows, (cu, longest) = x.shape[0], (segments.cu, segments.longest)
        x, y = self.norm1.after(x, delta)
        q, k, v = self.qkv(y).view(rows, 3, self.heads, -1).unbind(1)
        kernels.clear_tail_(cu, v)
        x, y = self.norm2.after(x, self.out(self.backend.attend(q, k, v, cu, cu, longest, longest, rows).flatten(1)))
        return x, self.mlp(y)
