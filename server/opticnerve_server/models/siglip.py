"""The block of SigLIP's encoder, which Gemma 3 and MiniCPM-V have."""

from __future__ import annotations

import torch

from .. import kernels
from ..attention.base import AttentionBackend
from .layers import GeluMLP, LayerNorm, Linear, Segments, Stream
from .tile_tower import TileConfig
from .weights import TensorSource


class Block:
    """Pre-norm residual attention and MLP; the three projections of attention run as one."""

    def __init__(
        self, source: TensorSource, name: str, config: TileConfig, eps: float, backend: AttentionBackend, stream: Stream
    ) -> None:
        width = config.hidden_size
        self.heads, self.backend = config.num_heads, backend
        self.norm1 = stream.read_by(LayerNorm.take(source, f"{name}.layer_norm1", width, eps))
        self.qkv = Linear.joined(Linear.take(source, f"{name}.self_attn.{part}_proj", width, width) for part in "qkv")
        self.out = stream.joined_by(Linear.take(source, f"{name}.self_attn.out_proj", width, width))
        self.norm2 = stream.read_by(LayerNorm.take(source, f"{name}.layer_norm2", width, eps))
        layers = f"{name}.mlp.fc1", f"{name}.mlp.fc2"
        self.mlp = GeluMLP.take(source, layers, width, config.intermediate_size, stream)

    def __call__(self, x: torch.Tensor, segments: Segments) -> None:
        """Add to `x` where it lies."""
        rows, (cu, longest) = x.shape[0], (segments.cu, segments.longest)
        q, k, v = self.qkv(self.norm1(x)).view(rows, 3, self.heads, -1).unbind(1)
        kernels.clear_tail_(cu, v)
        self.out.onto(x, self.backend.attend(q, k, v, cu, cu, longest, longest, rows).flatten(1))
        self.mlp.onto(x, self.norm2(x))
