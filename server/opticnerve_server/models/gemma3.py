"""Gemma 3: a SigLIP tower over one large tile an image, pooled to 256 tokens and projected.

Forward and numerics are those of transformers' SiglipVisionModel and Gemma3MultiModalProjector.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F

from ..attention.base import AttentionBackend
from ..types import Capacity, Layout
from .config import ModelError, read_grid_config
from .layers import LayerNorm, Linear, Segments, Stream
from .processor import BILINEAR, PLAIN, ProcessorClass, ProcessorError, read_channels, read_settings, require
from .resize import torch_bilinear
from .siglip import Block
from .tile_tower import TileConfig, TileTower, patch_linear
from .tiles import OneTile, TilePlanner, TileRule, View
from .weights import TensorSource

PAN_AND_SCAN = {
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
"""Settings of pan-and-scan, with the values that transformers' Gemma3Processor gives them where it is on."""

PROCESSOR = ProcessorClass(
    types=("Gemma3ImageProcessor",),
    defaults={
        **PLAIN,
        **PAN_AND_SCAN,
        "resample": BILINEAR,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"height": 224, "width": 224},
        "do_pan_and_scan": False,
    },
    resample=BILINEAR,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(TileConfig):
    """`vision_config` with the class defaults of SiglipVisionConfig, the pooling, and the language model's width."""

    depth: int = 12
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_heads: int = 12
    hidden_act: str = "gelu_pytorch_tanh"
    image_size: int = 224
    patch_size: int = 16
    layer_norm_eps: float = 1e-6
    attention_dropout: float = 0.0

    def check(self) -> None:
        """See GridConfig."""
        TileConfig.check(self)
        self.check_activation("gelu_pytorch_tanh")


@dataclass(frozen=True, slots=True, kw_only=True)
class PanAndScan:
    """The whole image, then slices of it where it is long: `pan_and_scan` of transformers' Gemma3ImageProcessor."""

    min_crop: int
    max_crops: int
    min_ratio: float

    @property
    def max_tiles(self) -> int:
        """See TileRule."""
        return 1 + self.max_crops

    def __call__(self, height: int, width: int) -> tuple[View, ...]:
        """See TileRule; the last slice may be shorter than the others."""
        count, step = self._slices(max(height, width), min(height, width))
        return self._views(height, width, count, step)

    def tiling(self, rows: int, columns: int) -> tuple[View, ...]:
        """See TileRule."""
        count = rows * columns
        if count == 1:
            return self._views(1, 1, 0, 0)
        return self._views(rows, columns, count, 1) if 1 in (rows, columns) and count <= self.max_crops else ()

    def _views(self, height: int, width: int, count: int, step: int) -> tuple[View, ...]:
        """The whole, and `count` slices of `step` pixels along the longer side."""
        whole = View(top=0, left=0, height=height, width=width, overview=count > 0)
        starts = range(0, count * step, step) if count else ()
        if width >= height:
            return (whole, *(View(top=0, left=at, height=height, width=step) for at in starts))
        return (whole, *(View(top=at, left=0, height=step, width=width) for at in starts))

    def _slices(self, longer: int, shorter: int) -> tuple[int, int]:
        """How many slices, and the pixels of one along the longer side."""
        if longer / shorter < self.min_ratio:
            return 0, 0
        count = min(math.floor(longer / self.min_crop), math.floor(longer / shorter + 0.5))
        count = min(self.max_crops, max(2, count))
        step = math.ceil(longer / count)
        return (0, 0) if min(step, shorter) < self.min_crop else (count, step)


@dataclass(frozen=True, slots=True)
class SoftEmbeddingNorm:
    """RMSNorm in float32 to the end, with a weight that counts from 1."""

    scale: torch.Tensor
    eps: float

    @classmethod
    def take(cls, source: TensorSource, name: str, size: int, eps: float) -> Self:
        return cls(1 + source.take(f"{name}.weight", size).float(), eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.scale, self.eps).to(x.dtype)


class Gemma3Tower(TileTower):
    """See `base.Tower`."""

    prefixes: ClassVar[Mapping[str, str]] = {
        "multi_modal_projector.": "projector.",
        "vision_tower.vision_model.": "",
        "vision_tower.": "",  # as transformers saves it since 5.0
    }

    def __init__(
        self, config: Gemma3Config, planner: TilePlanner, source: TensorSource, backend: AttentionBackend
    ) -> None:
        """Take all weights from `source`. Raises ModelError for a missing or misshapen one."""
        super().__init__(planner, source)
        width = config.hidden_size
        self.patch_embed = patch_linear(source, "embeddings.patch_embedding", config)
        self.positions = source.take("embeddings.position_embedding.weight", config.grid_side**2, width)
        stream, eps = Stream(), config.layer_norm_eps
        self.blocks = [Block(source, f"encoder.layers.{i}", config, eps, backend, stream) for i in range(config.depth)]
        self.norm = stream.read_by(LayerNorm.take(source, "post_layernorm", width, eps))
        self.out_norm = SoftEmbeddingNorm.take(source, "projector.mm_soft_emb_norm", width, config.layer_norm_eps)
        stored = source.take("projector.mm_input_projection_weight", width, config.out_hidden_size)
        self.out = Linear(stored.T.contiguous(), None)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Gemma3Config:
        """See TileTower. The pooling, in patches a side, follows from the number of tokens of an image."""
        parsed = read_grid_config(Gemma3Config, config)
        tokens = config.get("mm_tokens_per_image", 256)
        side = math.isqrt(tokens) if type(tokens) is int and tokens > 0 else 0
        if not side or side**2 != tokens or parsed.grid_side % side:
            raise ModelError(
                f"mm_tokens_per_image is {tokens!r}, must be a square whose side divides the {parsed.grid_side} "
                "patches of a side of the image"
            )
        pooled = {
            **config,
            "vision_config": {**config["vision_config"], "spatial_merge_size": parsed.grid_side // side},
        }
        return read_grid_config(Gemma3Config, pooled)

    @classmethod
    def build_planner(cls, architecture: str, config: TileConfig, processor: Mapping[str, Any]) -> TilePlanner:
        """See TileTower."""
        settings, side = read_settings(processor, PROCESSOR), config.image_size
        require(settings, "do_normalize", True, "pixels are always normalised")
        require(settings, "size", {"height": side, "width": side}, "it must be the tower's image_size in config.json")
        return TilePlanner(
            architecture=architecture,
            layout=Layout(config.out_hidden_size, 0),
            side=side,
            patch=config.patch_size,
            merge=config.spatial_merge_size,
            rule=_read_rule(settings),
            resize=torch_bilinear,
            mean=read_channels(settings, "image_mean"),
            std=read_channels(settings, "image_std"),
        )

    def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        """See `base.Tower.forward`: [units x 256, out_hidden_size]."""
        planner = self.planner
        x = self.patch_embed(self.tile_patches(buffers["pixels"], self.dtype))
        x = (x.view(capacity.units, -1, x.shape[1]) + self.positions).flatten(0, 1)
        segments = Segments(buffers["cu_tiles"], planner.paths[path].rows_per_unit)
        for block in self.blocks:
            block(x, segments)
        side, merge = planner.grid_side // planner.merge, planner.merge
        cells = self.norm(x).view(capacity.units, side, merge, side, merge, -1).float().mean((2, 4)).to(self.dtype)
        return self.out(self.out_norm(cells.flatten(0, 2)))


def _read_rule(settings: Mapping[str, object]) -> TileRule:
    if not settings["do_pan_and_scan"]:
        return OneTile()
    min_crop, max_crops, min_ratio = (settings[key] for key in PAN_AND_SCAN)
    if type(min_crop) is not int or type(max_crops) is not int or min(min_crop, max_crops) < 1:
        raise ProcessorError(
            f"pan_and_scan_min_crop_size is {min_crop!r} and pan_and_scan_max_num_crops is {max_crops!r}, both must be "
            "positive whole numbers"
        )
    if not isinstance(min_ratio, (int, float)) or min_ratio < 1:
        raise ProcessorError(f"pan_and_scan_min_ratio_to_activate is {min_ratio!r}, must be a number of at least 1")
    return PanAndScan(min_crop=min_crop, max_crops=max_crops, min_ratio=float(min_ratio))
