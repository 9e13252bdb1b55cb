"""Gemma 4: full attention within frames, sandwich norms, clipped or plain linear layers, and 3 x 3 pooling to tokens.

Forward and numerics are those of transformers' Gemma4VisionModel and the Gemma4MultimodalEmbedder behind it. Patches
lie cell by cell, which attention does not see, so that a pooled cell is a run of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F

from .. import kernels
from ..attention.base import AttentionBackend
from ..types import Capacity, Layout
from .config import GridConfig, ModelError
from .grid import GridPlanner
from .grid_tower import GridTower
from .layers import Linear, PatchLevels, Rope, Segments, paired
from .patches import PositionedFormat
from .processor import COMMON, ProcessorClass, ProcessorError, read_channels, read_settings, require
from .soft_tokens import SOFT_TOKENS, SoftTokenResize
from .weights import TensorSource

PROCESSOR = ProcessorClass(
    types=("Gemma4ImageProcessor",),
    defaults={
        **{key: value for key, value in COMMON.items() if key not in ("merge_size", "temporal_patch_size")},
        "do_normalize": False,
        "image_mean": [0.0, 0.0, 0.0],
        "image_std": [1.0, 1.0, 1.0],
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "max_soft_tokens": 280,
    },
)

CLIP_TOKENS = 32 * 70
"""Tokens of the largest video at the class defaults of the video processor: frames x tokens of a frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(GridConfig):
    """`vision_config` with the class defaults of Gemma4VisionConfig, and the language model's width."""

    KEYS: ClassVar[Mapping[str, str]] = {
        "depth": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "hidden_act": "hidden_activation",
        "spatial_merge_size": "pooling_kernel_size",
        "out_hidden_size": "text_config.hidden_size",
    }

    depth: int = 16
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    hidden_act: str = "gelu_pytorch_tanh"
    patch_size: int = 16
    spatial_merge_size: int = 3
    temporal_patch_size: int = 1
    rope_theta: float = 100.0
    rms_norm_eps: float = 1e-6
    position_embedding_size: int = 10240
    use_clipped_linears: bool = False
    standardize: bool = False

    def check(self) -> None:
        """See GridConfig."""
        GridConfig.check(self)
        self.check_activation("gelu_pytorch_tanh")
        if self.temporal_patch_size != 1:
            raise ModelError(f"{self.key('temporal_patch_size')} is {self.temporal_patch_size}, this family's is 1")

    def check_heads(self) -> None:
        """See GridConfig; heads need not add up to the width here."""
        if self.head_dim % 4:
            raise ModelError(f"{self.key('head_dim')} is {self.head_dim}, must be a multiple of 4")
        if self.num_key_value_heads != self.num_heads:
            raise ModelError(
                f"{self.key('num_key_value_heads')} is {self.num_key_value_heads}, only that of num_attention_heads "
                f"({self.num_heads}) is supported"
            )


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm over the last axis, in float32 to the end, with a float32 weight or none."""

    weight: torch.Tensor | None
    eps: float

    @classmethod
    def take(cls, source: TensorSource, name: str, size: int, eps: float) -> Self:
        return cls(source.take(f"{name}.weight", size).float(), eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)


@dataclass(frozen=True, slots=True)
class ClippedLinear:
    """A linear layer without bias; where the model has bounds, its inputs and outputs are clipped to them."""

    linear: Linear
    bounds: tuple[torch.Tensor, ...]  # of inputs from, to; of outputs from, to; or none

    @classmethod
    def take(cls, source: TensorSource, name: str, inputs: int, outputs: int, config: Gemma4Config) -> Self:
        names = ("input_min", "input_max", "output_min", "output_max") if config.use_clipped_linears else ()
        linear = Linear.take(source, f"{name}.linear", inputs, outputs, bias=False)
        return cls(linear, tuple(source.take(f"{name}.{bound}") for bound in names))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.bounds:
            return self.linear(x)
        input_min, input_max, output_min, output_max = self.bounds
        return self.linear(x.clamp(input_min, input_max)).clamp(output_min, output_max)


class Attention:
    """Attention whose queries, keys and values are normalised head by head; its scores are not scaled."""

    def __init__(self, source: TensorSource, name: str, config: Gemma4Config, backend: AttentionBackend) -> None:
        self.heads, self.head_dim, self.backend = config.num_heads, config.head_dim, backend
        width, inner = config.hidden_size, self.heads * self.head_dim
        # Backends divide scores by sqrt(head_dim): the norm's weight makes up for it, before anything is rounded.
        self.q, self.q_norm = self._turning(source, f"{name}.q", config, math.sqrt(self.head_dim))
        self.k, self.k_norm = self._turning(source, f"{name}.k", config, 1)
        self.v = ClippedLinear.take(source, f"{name}.v_proj", width, inner, config)
        self.v_norm = Norm(None, config.rms_norm_eps)
        self.out = ClippedLinear.take(source, f"{name}.o_proj", inner, width, config)

    def _turning(
        self, source: TensorSource, name: str, config: Gemma4Config, scale: float
    ) -> tuple[ClippedLinear, Norm]:
        """A projection and its norm, scaled, in the order that `kernels.rotate_` wants.

        Each half of a head turns by itself, the first with the column and the second with the row.
        """
        layer = ClippedLinear.take(source, f"{name}_proj", config.hidden_size, self.heads * self.head_dim, config)
        layer = replace(layer, linear=Linear(paired(layer.linear.weight, 2 * self.heads), None))
        weight = source.take(f"{name}_norm.weight", self.head_dim).float()
        return layer, Norm(paired(weight, 2) * scale, config.rms_norm_eps)

    def __call__(self, x: torch.Tensor, turns: torch.Tensor, segments: Segments) -> torch.Tensor:
        rows, shape = x.shape[0], (x.shape[0], self.heads, self.head_dim)
        qk = torch.stack([self.q_norm(self.q(x).view(shape)), self.k_norm(self.k(x).view(shape))], dim=1)
        kernels.rotate_(qk, turns)
        q, k = qk.unbind(1)
        v = self.v_norm(self.v(x).view(shape))
        cu, longest = segments.cu, segments.longest
        kernels.clear_tail_(cu, v)
        return self.out(self.backend.attend(q, k, v, cu, cu, longest, longest, rows).flatten(1))


class Block:
    """Residual attention and gated MLP, each between two norms."""

    def __init__(self, source: TensorSource, name: str, config: Gemma4Config, backend: AttentionBackend) -> None:
        width, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.before_attention = Norm.take(source, f"{name}.input_layernorm", width, eps)
        self.attention = Attention(source, f"{name}.self_attn", config, backend)
        self.after_attention = Norm.take(source, f"{name}.post_attention_layernorm", width, eps)
        self.before_mlp = Norm.take(source, f"{name}.pre_feedforward_layernorm", width, eps)
        self.gate = ClippedLinear.take(source, f"{name}.mlp.gate_proj", width, inner, config)
        self.up = ClippedLinear.take(source, f"{name}.mlp.up_proj", width, inner, config)
        self.down = ClippedLinear.take(source, f"{name}.mlp.down_proj", inner, width, config)
        self.after_mlp = Norm.take(source, f"{name}.post_feedforward_layernorm", width, eps)

    def __call__(self, x: torch.Tensor, turns: torch.Tensor, segments: Segments) -> torch.Tensor:
        x = x + self.after_attention(self.attention(self.before_attention(x), turns, segments))
        y = self.before_mlp(x)
        return x + self.after_mlp(self.down(F.gelu(self.gate(y), approximate="tanh") * self.up(y)))


class PatchEmbed:
    """From packed uint8 images to embedded patches [rows, width], their column and row looked up in a table each."""

    def __init__(self, source: TensorSource, config: Gemma4Config) -> None:
        self.levels = PatchLevels(config.patch_size, source.device)
        values = 3 * config.patch_size**2
        self.proj = Linear.take(source, "patch_embedder.input_proj", values, config.hidden_size, bias=False)
        self.columns, self.rows = source.take(
            "patch_embedder.position_embedding_table", 2, config.position_embedding_size, config.hidden_size
        )

    def patches(self, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Patches from -1 to 1, float32 [rows, patch x patch x 3]: rescaled by the processor, shifted by the tower."""
        return 2 * (self.levels(buffers, torch.float32) * (1 / 255) - 0.5)

    def __call__(self, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        embedded = self.proj(self.patches(buffers).to(self.proj.weight.dtype))
        row, column = buffers["position"].unbind(1)
        return embedded + (F.embedding(column, self.columns) + F.embedding(row, self.rows))


class Gemma4Tower(GridTower):
    """See `base.Tower`. Lines are pooled cells in the order of the items."""

    config_class = Gemma4Config
    processor_class = PROCESSOR
    # Checkpoints may hold a table of soft tokens under embed_vision beside the projection, which nothing uses.
    prefixes: ClassVar[Mapping[str, str]] = {
        "embed_vision.embedding_projection.": "embedding_projection.",
        "vision_tower.": "",
    }

    def __init__(
        self, config: Gemma4Config, planner: GridPlanner, source: TensorSource, backend: AttentionBackend
    ) -> None:
        """Take all weights from `source`. Raises ModelError for a missing or misshapen one."""
        super().__init__(planner, source)
        width = config.hidden_size
        self.patch_embed = PatchEmbed(source, config)
        self.rope = Rope(config.head_dim, config.rope_theta, source.device)
        self.blocks = [Block(source, f"encoder.layers.{i}", config, backend) for i in range(config.depth)]
        self.standard: tuple[torch.Tensor, torch.Tensor] | None = None
        if config.standardize:
            self.standard = (source.take("std_bias", width).float(), source.take("std_scale", width).float())
        self.out_norm = Norm(None, config.rms_norm_eps)
        self.out = Linear.take(source, "embedding_projection", width, config.out_hidden_size, bias=False)

    @classmethod
    def build_planner(cls, architecture: str, config: GridConfig, processor: Mapping[str, Any]) -> GridPlanner:
        """See GridTower."""
        assert isinstance(config, Gemma4Config)
        settings, patch, pool = read_settings(processor, PROCESSOR), config.patch_size, config.spatial_merge_size
        require(settings, "patch_size", patch, "it must be that of the tower in config.json")
        require(settings, "pooling_kernel_size", pool, "it must be that of the tower in config.json")
        if settings["do_normalize"]:
            require(settings, "image_mean", [0, 0, 0], "pixels are never normalised")
            require(settings, "image_std", [1, 1, 1], "pixels are never normalised")
        tokens = settings["max_soft_tokens"]
        if type(tokens) is not int or tokens not in SOFT_TOKENS:
            raise ProcessorError(f"max_soft_tokens is {tokens!r}, must be one of {SOFT_TOKENS}")
        longest, positions = tokens * pool, config.position_embedding_size
        if longest > positions:
            raise ProcessorError(
                f"max_soft_tokens is {tokens}, which allows strips of {longest} patches: the tower has {positions} "
                "positions, use fewer soft tokens"
            )
        return GridPlanner(
            architecture=architecture,
            layout=Layout(config.out_hidden_size, 0),
            patch=patch,
            merge=pool,
            temporal_patch=1,
            resize=SoftTokenResize(side=patch * pool, max_soft_tokens=tokens),
            mean=read_channels(settings, "image_mean"),
            std=read_channels(settings, "image_std"),
            max_clip_units=CLIP_TOKENS,
            patch_format=PositionedFormat,
            positions=positions,
        )

    def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        """See `base.Tower.forward`: [units, out_hidden_size]."""
        x = self.patch_embed(buffers)
        turns = self.rope.turns(buffers["position"].flip(1))  # columns turn the first half of a head
        turns = torch.view_as_complex(torch.view_as_real(turns).to(x.dtype).float())  # rounded, as officially
        segments = Segments(buffers["cu_frames"], capacity.longest)
        for block in self.blocks:
            x = block(x, turns, segments)
        return self.out(self.out_norm(self._pooled(x)))

    def _pooled(self, x: torch.Tensor) -> torch.Tensor:
        """Cells [units, width] of patches, rounded to their dtype as means and again at the end, float32 between."""
        width = x.shape[1]
        means = x.view(-1, self.planner.merge**2, width).float().mean(1).to(x.dtype)
        cells = means.float() * math.sqrt(width)
        if self.standard is not None:
            bias, scale = self.standard
            cells = (cells - bias) * scale
        return cells.to(x.dtype)
