"""Llama 4: a ViT with rotary embedding over tiles and one of the whole image, pixel shuffle, adapter and projector.

Forward and numerics are those of transformers' Llama4VisionModel, whose rows end at the adapter, and of its
Llama4MultiModalProjector behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from .. import kernels
from ..attention.base import AttentionBackend
from ..types import Capacity, Layout
from .canvas import BestCanvas
from .config import GridConfig, ModelError, read_grid_config
from .layers import LayerNorm, Linear, Rope, Segments, Stream
from .processor import BILINEAR, PLAIN, ProcessorClass, ProcessorError, read_channels, read_settings, require
from .resize import torch_bilinear
from .tile_tower import TileConfig, TileTower, patch_linear
from .tiles import TilePlanner
from .weights import TensorSource

PROCESSOR = ProcessorClass(
    types=("Llama4ImageProcessor",),
    defaults={
        **PLAIN,
        "resample": BILINEAR,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"height": 336, "width": 336},
        "max_patches": 16,
        "resize_to_max_canvas": False,
    },
    resample=BILINEAR,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Config(TileConfig):
    """`vision_config` with the class defaults of Llama4VisionConfig, and the language model's width."""

    depth: int = 34
    hidden_size: int = 768
    intermediate_size: int = 5632
    num_heads: int = 16
    hidden_act: str = "gelu"
    image_size: int = 448
    patch_size: int = 14
    vision_output_dim: int = 7680
    projector_input_dim: int = 4096
    projector_output_dim: int = 4096

    def check(self) -> None:
        """See GridConfig."""
        TileConfig.check(self)
        self.check_activation("gelu")
        if self.intermediate_size != self.merged_size:
            raise ModelError(
                f"{self.key('intermediate_size')} is {self.intermediate_size}, the patches of a token are "
                f"{self.merged_size} wide: the adapter takes both"
            )
        widths = (self.projector_input_dim, self.projector_output_dim, self.vision_output_dim)
        if len(set(widths)) != 1:
            raise ModelError(
                f"vision_config has projector_input_dim, projector_output_dim and vision_output_dim {widths}, which "
                "must be equal: the adapter's layers follow each other"
            )

    def check_heads(self) -> None:
        """See GridConfig."""
        GridConfig.check_heads(self)


class Block:
    """Pre-norm residual attention and MLP."""

    def __init__(
        self, source: TensorSource, name: str, config: Llama4Config, backend: AttentionBackend, stream: Stream
    ) -> None:
        width, attention = config.hidden_size, f"{name}.self_attn"
        self.heads, self.backend = config.num_heads, backend
        self.norm1 = stream.read_by(LayerNorm.take(source, f"{name}.input_layernorm", width, eps=1e-5))
        self.qkv = Linear.joined(Linear.take(source, f"{attention}.{part}_proj", width, width) for part in "qkv")
        self.out = stream.joined_by(Linear.take(source, f"{attention}.o_proj", width, width))
        self.norm2 = stream.read_by(LayerNorm.take(source, f"{name}.post_attention_layernorm", width, eps=1e-5))
        self.fc1 = Linear.take(source, f"{name}.mlp.fc1", width, config.intermediate_size)
        self.fc2 = stream.joined_by(Linear.take(source, f"{name}.mlp.fc2", config.intermediate_size, width))

    def __call__(self, x: torch.Tensor, turns: torch.Tensor, segments: Segments) -> None:
        """Add to `x` where it lies."""
        rows, (cu, longest) = x.shape[0], (segments.cu, segments.longest)
        qkv = self.qkv(self.norm1(x)).view(rows, 3, self.heads, -1)
        kernels.rotate_(qkv, turns, cu)  # the same in every tile
        q, k, v = qkv.unbind(1)
        self.out.onto(x, self.backend.attend(q, k, v, cu, cu, longest, longest, rows).flatten(1))
        self.fc2.onto(x, F.gelu(self.fc1(self.norm2(x))))


class Llama4AdapterTower(TileTower):
    """See `base.Tower`. Rows of a tile are its patches, then the class token; embeddings are those of the adapter."""

    prefixes: ClassVar[Mapping[str, str]] = {"vision_model.": ""}

    def __init__(
        self, config: Llama4Config, planner: TilePlanner, source: TensorSource, backend: AttentionBackend
    ) -> None:
        """Take all weights from `source`. Raises ModelError for a missing or misshapen one."""
        super().__init__(planner, source)
        width, side, inner = config.hidden_size, config.grid_side, config.projector_output_dim
        self.patch_embed = patch_linear(source, "patch_embedding.linear", config, bias=False, flat=True)
        positions = source.take("positional_embedding_vlm", side**2 + 1, width)
        self.positions = positions[:-1]
        self.class_row = source.take("class_embedding", width) + positions[-1:]
        self.turns = self._turns(config)
        self.norm_before = LayerNorm.take(source, "layernorm_pre", width, eps=1e-5)
        stream = Stream()
        self.blocks = [Block(source, f"model.layers.{i}", config, backend, stream) for i in range(config.depth)]
        self.norm_behind = stream.read_by(LayerNorm.take(source, "layernorm_post", width, eps=1e-5))
        self.fc1 = Linear.take(source, "vision_adapter.mlp.fc1", config.merged_size, inner, bias=False)
        self.fc2 = Linear.take(source, "vision_adapter.mlp.fc2", inner, inner, bias=False)

    def _turns(self, config: Llama4Config) -> torch.Tensor:
        """Of each row of a tile, complex64 [rows, 1, 1, head_dim / 2]: column and row count from 1, the class has 0."""
        index = torch.arange(config.grid_side**2, dtype=torch.int32, device=self.device)
        places = torch.stack([index % config.grid_side + 1, index // config.grid_side + 1], dim=1)
        return Rope(config.head_dim, config.rope_theta, self.device).turns(F.pad(places, (0, 0, 0, 1)))

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Llama4Config:
        """See TileTower."""
        vision = dict(config.get("vision_config") or {})
        ratio = vision.get("pixel_shuffle_ratio", 0.5)
        if not isinstance(ratio, (int, float)) or not 0 < ratio <= 1 or (1 / ratio) % 1:
            raise ModelError(f"vision_config.pixel_shuffle_ratio is {ratio!r}, must be one over a whole number")
        return read_grid_config(
            Llama4Config, {**config, "vision_config": {**vision, "spatial_merge_size": int(1 / ratio)}}
        )

    @classmethod
    def row_layout(cls, config: TileConfig) -> Layout:
        """What a row holds: the projector is left to the decoder."""
        assert isinstance(config, Llama4Config)
        return Layout(config.projector_output_dim, 0, projector_applied=False)

    @classmethod
    def build_planner(cls, architecture: str, config: TileConfig, processor: Mapping[str, Any]) -> TilePlanner:
        """See TileTower."""
        settings, side = read_settings(processor, PROCESSOR), config.image_size
        require(settings, "do_normalize", True, "pixels are always normalised")
        require(settings, "size", {"height": side, "width": side}, "it must be the tower's image_size in config.json")
        most, fill = settings["max_patches"], settings["resize_to_max_canvas"]
        if type(most) is not int or most < 1:
            raise ProcessorError(f"max_patches is {most!r}, must be a positive whole number")
        if type(fill) is not bool:
            raise ProcessorError(f"resize_to_max_canvas is {fill!r}, must be true or false")
        return TilePlanner(
            architecture=architecture,
            layout=cls.row_layout(config),
            side=side,
            patch=config.patch_size,
            merge=config.spatial_merge_size,
            rule=BestCanvas(side=side, most=most, fill=fill),
            resize=torch_bilinear,
            mean=read_channels(settings, "image_mean"),
            std=read_channels(settings, "image_std"),
            bfloat16=True,
            extra_rows=1,
        )

    def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        """See `base.Tower.forward`: [units x 144, projector_output_dim]."""
        tiles = capacity.units
        patches = self.patch_embed(self.tile_patches(buffers["pixels"], self.dtype))
        patches = patches.view(tiles, -1, patches.shape[1]) + self.positions
        x = self.norm_before(torch.cat([patches, self.class_row.expand(tiles, -1, -1)], dim=1).flatten(0, 1))
        segments = Segments(buffers["cu_tiles"], self.planner.paths[path].rows_per_unit)
        for block in self.blocks:
            block(x, self.turns, segments)
        cells = self.shuffled(self.norm_behind(x).view(tiles, -1, x.shape[1])[:, :-1])
        return F.gelu(self.fc2(F.gelu(self.fc1(cells))))


class Llama4Tower(Llama4AdapterTower):
    """See `base.Tower`. Embeddings are those behind the projector."""

    prefixes: ClassVar[Mapping[str, str]] = {"multi_modal_projector.": "projector.", "vision_model.": ""}

    def __init__(
        self, config: Llama4Config, planner: TilePlanner, source: TensorSource, backend: AttentionBackend
    ) -> None:
        """Take all weights from `source`. Raises ModelError for a missing or misshapen one."""
        super().__init__(config, planner, source, backend)
        inner = config.projector_output_dim
        self.out = Linear.take(source, "projector.linear_1", inner, config.out_hidden_size, bias=False)

    @classmethod
    def row_layout(cls, config: TileConfig) -> Layout:
        """See Llama4AdapterTower."""
        return Layout(config.out_hidden_size, 0)

    def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        """See `base.Tower.forward`: [units x 144, out_hidden_size]."""
        return self.out(super().forward(path, buffers, capacity))
