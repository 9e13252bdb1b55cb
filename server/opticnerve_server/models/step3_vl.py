"""The Step3-VL family: Step3's own tower, and the Perception Encoder of Step3-VL-10B and Step-3.7, on two paths.

Numerics of the Perception Encoder are those of transformers' Step3p7VisionModel, those of Step3's tower of its
published code; names and layout of the weights are those of the published checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from .. import kernels
from ..attention.base import AttentionBackend
from ..types import Capacity, ItemPlan, Layout
from .base import PIXELS, BufferSpec
from .config import GridConfig, ModelError, read_grid_config
from .dense import attend, resized_square
from .layers import LayerNorm, Linear, Rope, Stream
from .presets import PROCESSORS
from .processor import CLIP_MEAN, CLIP_STD, ProcessorError, read_channels
from .two_path import GLOBAL, LOCAL, Views
from .weights import TensorSource
from .windows import LEVELS, MANY_CROPS, Step3Planner

PROCESSOR = PROCESSORS["step3_vl"]
"""What the published code does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step3Config(GridConfig):
    """What both towers' `vision_config` says."""

    KEYS: ClassVar[Mapping[str, str]] = {
        "depth": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "in_channels": "num_channels",
        "out_hidden_size": "text_config.hidden_size",
    }

    hidden_act: str = "quick_gelu"
    patch_size: int = 14
    spatial_merge_size: int = 1
    temporal_patch_size: int = 1
    image_size: int = 728
    intermediate_size: int
    inner_size: int
    """Channels between the two convolutions behind the tower."""
    stride: int
    projector_bias: bool
    enable_patch: bool = True

    def check(self) -> None:
        """See GridConfig."""
        GridConfig.check(self)
        self.check_activation("quick_gelu")
        if self.image_size % self.patch_size:
            raise ModelError(f"{self.key('image_size')} is {self.image_size}, must be a multiple of a patch's side")

    def check_heads(self) -> None:
        """See GridConfig."""
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            raise ModelError(
                f"{self.key('hidden_size')} {self.hidden_size} over {self.num_heads} heads is no multiple of 4"
            )


def convolution(
    source: TensorSource, name: str, inputs: int, outputs: int, kernel: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias."""
    return source.take(f"{name}.weight", outputs, inputs, kernel, kernel), source.take(f"{name}.bias", outputs)


class Step3Base(ABC):
    """What both towers share; see `base.Tower`. Lines are the tokens of the views in raster order.

    All views of a path are of one size, so attention is dense over [views, rows] and views that nobody asked for touch
    no other.
    """

    prefixes: ClassVar[Mapping[str, str]] = {name: name for name in ("vision_model.", "vit_downsampler", "vit_large_")}
    constant_rows: torch.Tensor | None = None

    def __init__(self, config: Step3Config, planner: Step3Planner, source: TensorSource) -> None:
        self.planner, self.device, self.dtype = planner, source.device, source.dtype
        self.patch = config.patch_size
        self.sides = {path: views.side // self.patch for path, views in planner.views.items()}
        self.mean = torch.tensor(CLIP_MEAN, device=self.device) * 255
        self.std = torch.tensor(CLIP_STD, device=self.device) * 255
        self.heads = config.num_heads
        self.projector = Linear.take(
            source, "vit_large_projector", 2 * config.inner_size, config.out_hidden_size, bias=config.projector_bias
        )

    @classmethod
    @abstractmethod
    def read_config(cls, config: Mapping[str, Any]) -> Step3Config:
        """The tower's part of a parsed config.json. Raises ModelError."""

    @classmethod
    @abstractmethod
    def tokens(cls, side: int, stride: int) -> int:
        """Tokens along a side of so many patches."""

    @classmethod
    def build_planner(cls, architecture: str, config: Step3Config, processor: Mapping[str, Any]) -> Step3Planner:
        """The planner of this configuration and processor. Raises ProcessorError."""
        settings = {**PROCESSOR, **{key: processor[key] for key in PROCESSOR if processor.get(key) is not None}}
        for key, wanted in (("image_mean", CLIP_MEAN), ("image_std", CLIP_STD)):
            if read_channels(settings, key) != tuple(wanted):
                raise ProcessorError(f"{key} is {settings[key]!r}, this family's is {wanted}")
        whole, crop, largest = config.image_size, settings["patch_size"], settings["max_image_size"]
        if settings["size"] != {"height": whole, "width": whole}:
            raise ProcessorError(f"size is {settings['size']!r}, must be the tower's image_size {whole} in config.json")
        for key, value in (("patch_size", crop), ("max_image_size", largest)):
            if type(value) is not int or value < config.patch_size or value % config.patch_size:
                raise ProcessorError(f"{key} is {value!r}, must be a multiple of the {config.patch_size} of a patch")
        views = {}
        for path, side, most in ((GLOBAL, whole, 1), (LOCAL, crop, MANY_CROPS)):
            patches = side // config.patch_size
            tokens = cls.tokens(patches, config.stride) ** 2
            views[path] = Views(side=side, patches=patches**2, tokens=tokens, nbytes=side**2 * 6, most=most)
        layout = Layout(config.out_hidden_size, 0)
        return Step3Planner(architecture, layout, views, largest=largest, with_crops=config.enable_patch)

    def patches(self, pixels: torch.Tensor, side: int) -> torch.Tensor:
        """Of packed views the normalised patches [views, side^2, patch x patch x 3]."""
        halves = pixels.view(-1, 2).float()
        levels = halves[:, 1] + halves[:, 0] / LEVELS
        ordered = levels.view(-1, side, self.patch, side, self.patch, 3).transpose(2, 3)
        return ((ordered - self.mean) / self.std).to(self.dtype).reshape(-1, side * side, self.patch**2 * 3)

    def buffers(self, path: str, capacity: Capacity) -> dict[str, BufferSpec]:
        """See `base.Tower.buffers`."""
        return {PIXELS: BufferSpec((capacity.units * self.planner.views[path].nbytes,), "uint8")}

    def fill(self, path: str, parts: Sequence[ItemPlan], out: Mapping[str, npt.NDArray[np.generic]]) -> None:  # noqa: B027
        """See `base.Tower.fill`. There is nothing to say beside the pixels."""

    def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        """See `base.Tower.forward`: [units x tokens of a view, out_hidden_size]."""
        side = self.sides[path]
        x = self.encode(self.patches(buffers[PIXELS], side), side)
        x = self.downsample(x.transpose(1, 2).unflatten(2, (side, side)))
        return self.projector(x.flatten(2).transpose(1, 2)).flatten(0, 1)

    @abstractmethod
    def encode(self, patches: torch.Tensor, side: int) -> torch.Tensor:
        """Patches [views, side^2, ...] to [views, side^2, width]."""

    @abstractmethod
    def downsample(self, x: torch.Tensor) -> torch.Tensor:
        """[views, width, side, side] to [views, 2 x inner, tokens, tokens]."""

    def gather_index(self, parts: Sequence[ItemPlan], lines: Mapping[str, int]) -> npt.NDArray[np.int32]:
        """See `base.Tower.gather_index`: the crops, then the whole view."""
        whole, crop = (self.planner.views[path].tokens for path in (GLOBAL, LOCAL))
        index, seen, cut = [], 0, lines[GLOBAL]
        for part in parts:
            count = part.paths[LOCAL].units * crop
            index += [np.arange(cut, cut + count), np.arange(seen, seen + whole)]
            seen, cut = seen + whole, cut + count
        return np.concatenate(index).astype(np.int32)


class PerceptionBlock:
    """Pre-norm attention with rotary embedding and MLP, both scaled."""

    def __init__(self, source: TensorSource, name: str, config: Step3Config, stream: Stream) -> None:
        width, self.heads = config.hidden_size, config.num_heads
        self.norm1 = stream.read_by(LayerNorm.take(source, f"{name}.ln_1", width, eps=1e-5))
        weight = source.take(f"{name}.attn.in_proj_weight", 3 * width, width)
        self.qkv = Linear(weight, source.take(f"{name}.attn.in_proj_bias", 3 * width))
        scale1, scale2 = (source.take(f"{name}.ls_{i}.gamma", width) for i in (1, 2))
        self.out = stream.joined_by(Linear.take(source, f"{name}.attn.out_proj", width, width), scale1)
        self.norm2 = stream.read_by(LayerNorm.take(source, f"{name}.ln_2", width, eps=1e-5))
        self.fc1 = Linear.take(source, f"{name}.mlp.c_fc", width, config.intermediate_size)
        self.fc2 = stream.joined_by(Linear.take(source, f"{name}.mlp.c_proj", config.intermediate_size, width), scale2)

    def __call__(self, x: torch.Tensor, turns: torch.Tensor) -> None:
        """Add to `x` where it lies."""
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1))
        kernels.rotate_(qkv.flatten(0, 1), turns)  # the same in every view
        self.out.onto(x, attend(qkv))
        self.fc2.onto(x, kernels.quick_gelu(self.fc1(self.norm2(x))))


class PerceptionTower(Step3Base):
    """The Perception Encoder: Step3-VL-10B and Step-3.7."""

    def __init__(
        self, config: Step3Config, planner: Step3Planner, source: TensorSource, backend: AttentionBackend
    ) -> None:
        """Take all weights from `source`. Raises ModelError for a missing or misshapen one."""
        super().__init__(config, planner, source)
        width, patch, side = config.hidden_size, config.patch_size, config.image_size // config.patch_size
        weight = source.take("vision_model.conv1.weight", width, 3, patch, patch)
        self.patch_embed = Linear(weight.permute(0, 2, 3, 1).reshape(width, -1).contiguous(), None)
        table = source.take("vision_model.positional_embedding", side**2, width).view(side, side, width)
        self.positions = {side: _bilinear(table, side) for side in self.sides.values()}
        self.norm_before = LayerNorm.take(source, "vision_model.ln_pre", width, eps=1e-5)
        name = "vision_model.transformer.resblocks"
        stream = Stream()
        self.blocks = [PerceptionBlock(source, f"{name}.{i}", config, stream) for i in range(config.depth)]
        self.stream = stream
        self.down1 = convolution(source, "vision_model.vit_downsampler1", width, config.inner_size, 3)
        self.down2 = convolution(source, "vision_model.vit_downsampler2", config.inner_size, 2 * config.inner_size, 3)
        rope = Rope(config.head_dim, config.rope_theta, self.device)
        self.turns = {side: rope.turns(_places(side, self.device)) for side in self.sides.values()}

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Step3Config:
        """See Step3Base. The defaults are those of the published configurations."""
        vision = dict(config.get("vision_config") or {})
        for ours, theirs in (
            ("hidden_size", "width"),
            ("num_hidden_layers", "layers"),
            ("num_attention_heads", "heads"),
        ):
            vision.setdefault(ours, vision.get(theirs))
        for key, wanted in (
            ("use_cls_token", False),
            ("use_rope2d", True),
            ("use_ln_pre", True),
            ("use_ln_post", False),
        ):
            if vision.get(key, wanted) is not wanted:
                raise ModelError(f"config.json: vision_config.{key} is {vision[key]!r}, must be {wanted}")
        width, ratio = vision.get("hidden_size") or 1536, vision.get("mlp_ratio") or 8960 / 1536
        defaults = {"hidden_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 16}
        vision = {**defaults, **{key: value for key, value in vision.items() if value is not None}}
        stride = config.get("understand_projector_stride", 2)
        if stride != 2:
            raise ModelError(f"config.json: understand_projector_stride is {stride!r}, this tower's is 2")
        bias = bool(config.get("projector_bias", False))
        vision |= {
            "inner_size": 2 * width,
            "intermediate_size": int(width * ratio),
            "stride": 2,
            "projector_bias": bias,
        }
        return read_grid_config(Step3Config, {**config, "vision_config": vision})

    @classmethod
    def tokens(cls, side: int, stride: int) -> int:
        """See Step3Base."""
        return (side + 3) // 4

    def encode(self, patches: torch.Tensor, side: int) -> torch.Tensor:
        """See Step3Base."""
        x = self.norm_before(self.patch_embed(patches) + self.positions[side])
        for block in self.blocks:
            block(x, self.turns[side])
        return self.stream.settled(x)

    def downsample(self, x: torch.Tensor) -> torch.Tensor:
        """See Step3Base."""
        for weight, bias in (self.down1, self.down2):
            x = F.conv2d(x, weight, bias, stride=2, padding=1)
        return x


class Step3Block:
    """Attention and MLP with a norm behind each, inside the residual branch."""

    def __init__(self, source: TensorSource, name: str, config: Step3Config) -> None:
        width, self.heads = config.hidden_size, config.num_heads
        self.qkv = Linear.take(source, f"{name}.self_attn.qkv_proj", width, 3 * width)
        self.out = Linear.take(source, f"{name}.self_attn.out_proj", width, width)
        # The published code has 1e-6 here, whatever layer_norm_eps says.
        self.norm1 = LayerNorm.take(source, f"{name}.layer_norm1", width, eps=1e-6)
        self.norm2 = LayerNorm.take(source, f"{name}.layer_norm2", width, eps=1e-6)
        self.fc1 = Linear.take(source, f"{name}.mlp.fc1", width, config.intermediate_size)
        self.fc2 = Linear.take(source, f"{name}.mlp.fc2", config.intermediate_size, width)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.norm1(self.out(attend(self.qkv(x).unflatten(2, (3, self.heads, -1)))))
        return x + self.norm2(self.fc2(kernels.quick_gelu(self.fc1(x))))


class Step3Tower(Step3Base):
    """Step3's own tower. Four equal class rows lead each view, a relic of its training, and are dropped behind it."""

    LEADING: ClassVar[int] = 4

    def __init__(
        self, config: Step3Config, planner: Step3Planner, source: TensorSource, backend: AttentionBackend
    ) -> None:
        """Take all weights from `source`. Raises ModelError for a missing or misshapen one."""
        super().__init__(config, planner, source)
        width, patch, side = config.hidden_size, config.patch_size, config.image_size // config.patch_size
        name = "vision_model.embeddings"
        weight = source.take(f"{name}.patch_embedding.weight", width, 3, patch, patch)
        bias = source.take(f"{name}.patch_embedding.bias", width)
        self.patch_embed = Linear(weight.permute(0, 2, 3, 1).reshape(width, -1).contiguous(), bias)
        table = source.take(f"{name}.position_embedding.weight", side**2 + 1, width)
        self.class_row = source.take(f"{name}.class_embedding", 1, width) + table[:1]
        square = table[1:].view(side, side, width)
        self.positions = {side: resized_square(square, side).flatten(0, 1) for side in self.sides.values()}
        layers = "vision_model.transformer.layers"
        self.blocks = [Step3Block(source, f"{layers}.{i}", config) for i in range(config.depth)]
        self.stride = config.stride
        self.down1 = convolution(source, "vit_downsampler", width, config.inner_size, 2)
        self.down2 = convolution(source, "vit_downsampler2", config.inner_size, 2 * config.inner_size, 3)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Step3Config:
        """See Step3Base. What the published file says is not known well enough to stand in for it."""
        vision = dict(config.get("vision_config") or {})
        vision |= {"inner_size": vision.get("output_hidden_size"), "stride": config.get("understand_projector_stride")}
        vision["projector_bias"] = config.get("projector_bias")
        for key, value in (
            ("vision_config.output_hidden_size", vision["inner_size"]),
            ("understand_projector_stride", vision["stride"]),
            ("projector_bias", vision["projector_bias"]),
        ):
            if value is None:
                raise ModelError(f"config.json: there is no {key}; take the file that was published with the weights")
        return read_grid_config(Step3Config, {**config, "vision_config": vision})

    @classmethod
    def tokens(cls, side: int, stride: int) -> int:
        """See Step3Base."""
        return ((side - 2) // stride + 2) // 2

    def encode(self, patches: torch.Tensor, side: int) -> torch.Tensor:
        """See Step3Base."""
        leading = self.class_row.expand(len(patches), self.LEADING, -1)
        x = torch.cat([leading, self.patch_embed(patches) + self.positions[side]], dim=1)
        for block in self.blocks:
            x = block(x)
        return x[:, self.LEADING :]

    def downsample(self, x: torch.Tensor) -> torch.Tensor:
        """See Step3Base."""
        x = F.conv2d(x, *self.down1, stride=self.stride)
        return F.conv2d(x, *self.down2, stride=2, padding=1)


def _places(side: int, device: torch.device) -> torch.Tensor:
    """(column, row) of each patch, int32 [side^2, 2]: the first half of a head turns with the column."""
    index = torch.arange(side**2, dtype=torch.int32, device=device)
    return torch.stack([index % side, index // side], dim=1)


def _bilinear(table: torch.Tensor, side: int) -> torch.Tensor:
    """A table [n, n, width] for another side, in its own dtype: [side^2, width]."""
    if table.shape[0] != side:
        square = table.permute(2, 0, 1)[None]
        table = F.interpolate(square, (side, side), mode="bilinear", align_corners=False)[0].permute(1, 2, 0)
    return table.flatten(0, 1)
