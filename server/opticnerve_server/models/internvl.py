"""InternVL 2, 2.5, 3 and 3.5: a ViT with layer scale over dynamic tiles, pixel shuffle and an MLP.

Forward and numerics are those of transformers' InternVLModel. Checkpoints come in two formats, that of transformers and
that of the authors (InternVLChatModel); they differ in names, in the fusion of q, k and v, and in where they keep the
settings of tiling.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from .. import kernels
from ..attention.base import AttentionBackend
from ..types import Capacity, Layout
from .clip import OneTileEach, SampledClips
from .config import ModelError, read_grid_config
from .layers import LayerNorm, Linear, RMSNorm, Segments, Stream
from .processor import PLAIN, ProcessorClass, ProcessorError, read_channels, read_settings, require
from .resize import pillow_bicubic, torch_bicubic
from .sampling import FrameSampler, SamplingSettings, internvl_chat
from .tile_tower import TileConfig, TileTower, patch_linear
from .tiles import TilePlanner, View, tiles_of_one_pixel, with_overview
from .weights import TensorSource

PROCESSOR = ProcessorClass(
    types=("GotOcr2ImageProcessor",),
    defaults={
        **PLAIN,
        "size": {"height": 384, "width": 384},
        "crop_to_patches": False,
        "min_patches": 1,
        "max_patches": 12,
    },
)

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the authors' format, which has them in its code."""

AUTHORS_SAMPLER = FrameSampler(
    rule=internvl_chat,
    settings=SamplingSettings(temporal_patch=1),
    overrides=frozenset({"num_frames"}),
    enabled=False,
)
"""The authors' code has a number of frames for an argument; without one, all are taken."""

TILING = {"dynamic_image_size": False, "use_thumbnail": False, "min_dynamic_patch": 1, "max_dynamic_patch": 6}
"""Settings of tiling in config.json of the authors' format, with the defaults of InternVLChatConfig."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVLConfig(TileConfig):
    """`vision_config` with the class defaults of InternVLVisionConfig, and what of the rest the tower depends on."""

    depth: int = 24
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_heads: int = 16
    hidden_act: str = "gelu"
    image_size: int = 448
    patch_size: int = 14
    layer_norm_eps: float = 1e-6
    norm_type: str = "layer_norm"
    attention_bias: bool = False
    use_qk_norm: bool = False
    use_mean_pooling: bool = True
    use_absolute_position_embeddings: bool = True
    layers_used: int = 1  # less than depth where rows are those of an earlier layer

    @property
    def qk_norm_eps(self) -> float:
        """Of the norms of queries and keys, which is not in transformers' configuration."""
        return 1e-6

    def check(self) -> None:
        """See GridConfig."""
        TileConfig.check(self)
        self.check_activation("gelu")
        if self.norm_type not in NORMS:
            raise ModelError(f"{self.key('norm_type')} is {self.norm_type!r}, must be one of {', '.join(NORMS)}")
        for field in ("use_mean_pooling", "use_absolute_position_embeddings"):
            if not getattr(self, field):
                raise ModelError(f"{self.key(field)} is False, only True is supported")


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVLChatConfig(InternVLConfig):
    """The same in the authors' format, with the class defaults of InternVisionConfig."""

    KEYS: ClassVar[Mapping[str, str]] = {
        **TileConfig.KEYS,
        "attention_bias": "qkv_bias",
        "use_qk_norm": "qk_normalization",
    }

    depth: int = 48
    hidden_size: int = 3200
    intermediate_size: int = 12800
    num_heads: int = 25
    image_size: int = 224
    norm_type: str = "rms_norm"
    use_qk_norm: bool = True

    @property
    def qk_norm_eps(self) -> float:
        """See InternVLConfig."""
        return self.layer_norm_eps


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicTiles:
    """The grid of `least` to `most` tiles whose aspect is nearest the image's, then the whole image as one more.

    `get_optimal_tiled_canvas` of transformers' GotOcr2ImageProcessor, which is the authors' rule. Of two grids as near,
    the larger wins while the image has over half of its pixels.
    """

    side: int
    least: int
    most: int
    thumbnail: bool = True

    @property
    def max_tiles(self) -> int:
        """See TileRule."""
        return self.most + (self.thumbnail and self.most > 1)

    def __call__(self, height: int, width: int) -> tuple[View, ...]:
        """See TileRule."""
        rows, columns = self._grid(height, width)
        tiled = View(top=0, left=0, height=height, width=width, rows=rows, columns=columns)
        return with_overview(tiled) if self.thumbnail else (tiled,)

    def tiling(self, rows: int, columns: int) -> tuple[View, ...]:
        """See TileRule."""
        if not self.least <= rows * columns <= self.most:
            return ()
        tiled = tiles_of_one_pixel(rows, columns)
        return with_overview(tiled) if self.thumbnail else (tiled,)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        nearest, best = float("inf"), (1, 1)
        for rows, columns in _grids(self.least, self.most):
            off = abs(width / height - columns / rows)
            enough = height * width > 0.5 * self.side**2 * rows * columns
            if off < nearest or (off == nearest and enough):
                nearest, best = off, (rows, columns)
        return best


@functools.cache
def _grids(least: int, most: int) -> list[tuple[int, int]]:
    """Rows and columns of every grid of `least` to `most` tiles, by the number of tiles, then by columns."""
    grids = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    return sorted((grid for grid in grids if grid[0] * grid[1] >= least), key=lambda grid: grid[0] * grid[1])


NORMS: Mapping[str, Callable[[TensorSource, str, int, float], LayerNorm | RMSNorm]] = {
    "layer_norm": LayerNorm.take,
    "rms_norm": RMSNorm.take,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a format calls the tensors, less the prefixes."""

    first: str  # the class token
    patches: str
    positions: str
    blocks: str
    qkv: tuple[str, ...]  # of the projections whose outputs are q, k and v, one behind another
    attention: str
    out: str
    norms: tuple[str, str]
    scales: tuple[str, str]
    projector: tuple[str, str, str]  # norm and both layers


class Block:
    """Residual attention and MLP, each normalised before and scaled behind."""

    def __init__(
        self,
        source: TensorSource,
        name: str,
        config: InternVLConfig,
        names: Names,
        backend: AttentionBackend,
        stream: Stream,
    ) -> None:
        width, inner, attention = config.hidden_size, config.intermediate_size, f"{name}.{names.attention}"
        self.heads, self.backend = config.num_heads, backend
        norm, eps, (norm1, norm2) = NORMS[config.norm_type], config.layer_norm_eps, names.norms
        scale1, scale2 = (source.take(f"{name}.{part}", width) for part in names.scales)
        self.norm1 = stream.read_by(norm(source, f"{name}.{norm1}", width, eps))
        outputs = 3 * width // len(names.qkv)
        self.qkv = Linear.joined(
            Linear.take(source, f"{attention}.{part}", width, outputs, bias=config.attention_bias) for part in names.qkv
        )
        self.qk_norms: tuple[RMSNorm, ...] = ()
        if config.use_qk_norm:
            eps = config.qk_norm_eps
            self.qk_norms = tuple(RMSNorm.take(source, f"{attention}.{part}_norm", width, eps) for part in "qk")
        self.out = stream.joined_by(Linear.take(source, f"{attention}.{names.out}", width, width), scale1)
        self.norm2 = stream.read_by(norm(source, f"{name}.{norm2}", width, eps))
        self.fc1 = Linear.take(source, f"{name}.mlp.fc1", width, inner)
        self.fc2 = stream.joined_by(Linear.take(source, f"{name}.mlp.fc2", inner, width), scale2)

    def __call__(self, x: torch.Tensor, segments: Segments) -> None:
        """Add to `x` where it lies."""
        self.out.onto(x, self._attend(self.norm1(x), segments))
        self.fc2.onto(x, F.gelu(self.fc1(self.norm2(x))))

    def _attend(self, x: torch.Tensor, segments: Segments) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=1)
        if self.qk_norms:  # over all heads together
            q, k = (norm(part) for norm, part in zip(self.qk_norms, (q, k), strict=True))
        q, k, v = (part.view(len(x), self.heads, -1) for part in (q, k, v))
        cu, longest = segments.cu, segments.longest
        kernels.clear_tail_(cu, v)
        return self.backend.attend(q, k, v, cu, cu, longest, longest, len(x)).flatten(1)


class InternVLTower(TileTower):
    """See `base.Tower`. Of transformers' format; rows of a tile are the class token, then its patches."""

    prefixes: ClassVar[Mapping[str, str]] = {"multi_modal_projector.": "projector.", "vision_tower.": ""}
    names: ClassVar[Names] = Names(
        first="embeddings.cls_token",
        patches="embeddings.patch_embeddings.projection",
        positions="embeddings.position_embeddings",
        blocks="encoder.layer",
        attention="attention",
        qkv=("q_proj", "k_proj", "v_proj"),
        out="projection_layer",
        norms=("layernorm_before", "layernorm_after"),
        scales=("lambda_1", "lambda_2"),
        projector=("layer_norm", "linear_1", "linear_2"),
    )

    def __init__(
        self, config: InternVLConfig, planner: TilePlanner, source: TensorSource, backend: AttentionBackend
    ) -> None:
        """Take all weights from `source`. Raises ModelError for a missing or misshapen one."""
        super().__init__(planner, source)
        names, width, out = self.names, config.hidden_size, config.out_hidden_size
        positions = source.take(names.positions, 1, config.grid_side**2 + 1, width)
        self.class_row = source.take(names.first, 1, 1, width) + positions[:, :1]
        self.positions = positions[:, 1:]
        self.patch_embed = patch_linear(source, names.patches, config)
        stream, unused = Stream(), Stream()
        self.blocks = [
            Block(source, f"{names.blocks}.{i}", config, names, backend, stream) for i in range(config.layers_used)
        ]
        for i in range(config.layers_used, config.depth):
            Block(source, f"{names.blocks}.{i}", config, names, backend, unused)
        norm, first, second = (f"projector.{part}" for part in names.projector)
        self.out_norm = stream.read_by(LayerNorm.take(source, norm, config.merged_size, eps=1e-5))
        self.fc1 = Linear.take(source, first, config.merged_size, out)
        self.fc2 = Linear.take(source, second, out, out)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> InternVLConfig:
        """See TileTower."""
        _require(config, "vision_feature_select_strategy", "default", "default")
        _require(config, "projector_hidden_act", "gelu", "gelu")
        return _read(InternVLConfig, config, "vision_feature_layer")

    @classmethod
    def build_planner(cls, architecture: str, config: TileConfig, processor: Mapping[str, Any]) -> TilePlanner:
        """See TileTower. Images are always cut, as transformers' InternVLProcessor does whatever the file says."""
        settings, side = read_settings(processor, PROCESSOR), config.image_size
        require(settings, "do_normalize", True, "pixels are always normalised")
        require(settings, "size", {"height": side, "width": side}, "it must be the tower's image_size in config.json")
        least, most = _range(settings, "min_patches", "max_patches")
        return TilePlanner(
            architecture=architecture,
            layout=Layout(config.out_hidden_size, 0),
            side=side,
            patch=config.patch_size,
            merge=config.spatial_merge_size,
            rule=DynamicTiles(side=side, least=least, most=most),
            resize=torch_bicubic,
            mean=read_channels(settings, "image_mean"),
            std=read_channels(settings, "image_std"),
            extra_rows=1,
        )

    def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        """See `base.Tower.forward`: [units x 256, out_hidden_size]."""
        tiles = capacity.units
        patches = self.patch_embed(self.tile_patches(buffers["pixels"], self.dtype))
        patches = patches.view(tiles, -1, patches.shape[1]) + self.positions
        x = torch.cat([self.class_row.expand(tiles, -1, -1), patches], dim=1).flatten(0, 1)
        segments = Segments(buffers["cu_tiles"], self.planner.paths[path].rows_per_unit)
        for block in self.blocks:
            block(x, segments)
        cells = self.shuffled(x.view(tiles, -1, x.shape[1])[:, 1:])
        return self.fc2(F.gelu(self.fc1(self.out_norm(cells))))


class InternVLChatTower(InternVLTower):
    """See `base.Tower`. Of the authors' format."""

    prefixes: ClassVar[Mapping[str, str]] = {"mlp1.": "projector.", "vision_model.": ""}
    names: ClassVar[Names] = Names(
        first="embeddings.class_embedding",
        patches="embeddings.patch_embedding",
        positions="embeddings.position_embedding",
        blocks="encoder.layers",
        attention="attn",
        qkv=("qkv",),
        out="proj",
        norms=("norm1", "norm2"),
        scales=("ls1", "ls2"),
        projector=("0", "1", "3"),
    )

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> InternVLConfig:
        """See TileTower."""
        _require(config, "ps_version", "v2", "v1")
        parsed = _read(InternVLChatConfig, {**config, "text_config": config.get("llm_config")}, "select_layer")
        _require(config, "force_image_size", parsed.image_size, parsed.image_size)
        return parsed

    @classmethod
    def build_planner(cls, architecture: str, config: TileConfig, processor: Mapping[str, Any]) -> TilePlanner:
        """See TileTower. The authors' own code resizes with Pillow."""
        settings = {**TILING, **processor}
        for key in ("dynamic_image_size", "use_thumbnail"):
            if type(settings[key]) is not bool:
                raise ProcessorError(f"{key} is {settings[key]!r}, must be true or false")
        least, most = _range(settings, "min_dynamic_patch", "max_dynamic_patch")
        if not settings["dynamic_image_size"]:
            least = most = 1
        return TilePlanner(
            architecture=architecture,
            layout=Layout(config.out_hidden_size, 0),
            side=config.image_size,
            patch=config.patch_size,
            merge=config.spatial_merge_size,
            rule=DynamicTiles(side=config.image_size, least=least, most=most, thumbnail=settings["use_thumbnail"]),
            resize=pillow_bicubic,
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            extra_rows=1,
            clips=SampledClips(sample=AUTHORS_SAMPLER, resize=OneTileEach(config.image_size), temporal_patch=1),
        )


def _read(cls: type[InternVLConfig], config: Mapping[str, Any], layer_key: str) -> InternVLConfig:
    """The configuration with sides as single numbers, the pooling and the number of layers in their own fields."""
    vision = {key: _side(key, value) for key, value in (config.get("vision_config") or {}).items()}
    ratio, layer = config.get("downsample_ratio", 0.5), config.get(layer_key, -1)
    if not isinstance(ratio, (int, float)) or not 0 < ratio <= 1 or (1 / ratio) % 1:
        raise ModelError(f"downsample_ratio is {ratio!r}, must be one over a whole number")
    depth = vision.get("num_hidden_layers", cls.__dataclass_fields__["depth"].default)
    if type(layer) is not int or not -depth <= layer < 0:
        raise ModelError(f"{layer_key} is {layer!r}, must be a layer counted from the last, from -1 to -{depth}")
    vision |= {"spatial_merge_size": int(1 / ratio), "layers_used": depth + 1 + layer}
    return read_grid_config(cls, {**config, "vision_config": vision})


def _side(key: str, value: Any) -> Any:
    """Sides are pairs in transformers' format; those of a square become one number."""
    if key in ("image_size", "patch_size") and isinstance(value, list) and len(value) == 2:
        if value[0] != value[1]:
            raise ModelError(f"vision_config.{key} is {value}, only squares are supported")
        return value[0]
    return value


def _require(config: Mapping[str, Any], key: str, wanted: Any, default: Any) -> None:
    value = config.get(key)
    if (default if value is None else value) != wanted:
        raise ModelError(f"{key} is {value!r}, only {wanted!r} is supported")


def _range(settings: Mapping[str, Any], low: str, high: str) -> tuple[int, int]:
    least, most = settings[low], settings[high]
    if type(least) is not int or type(most) is not int or not 1 <= least <= most:
        raise ProcessorError(f"{low} is {least!r} and {high} is {most!r}, must be whole numbers, 1 <= {low} <= {high}")
    return least, most
