"""DeepSeek-OCR: SAM's ViT with windows, then CLIP's over what it has seen, both side by side through one projector.

Forward and numerics are those of transformers' UnlimitedOcrVisionModel, the same tower, and of the linear layer behind
it; names and layout of the weights are those of the published checkpoint. Path `global` sees the whole image, `local`
its crops, with the same weights and with tables of their own sizes, made once.
"""

from __future__ import annotations

import functools
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
from .config import ModelError
from .crops import SAM_PATCH, DeepseekOcrPlanner
from .dense import attend, resized_square
from .layers import LayerNorm, Linear, Stream
from .presets import PROCESSORS
from .processor import ProcessorError, read_channels
from .two_path import GLOBAL, LOCAL
from .weights import TensorSource

SAM, CLIP = "sam_vit_b", "clip-l-14-224"
MLP_RATIO = 4
"""Of both towers; `mlp_ratio` of the published file is that of neither."""

WINDOW = 14
NECK = 256

PROCESSOR = PROCESSORS["deepseek_ocr"]
"""What the published code does, which has no file for it. `max_crops` is that of its batch script and of vLLM; `infer`
takes 9."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekOcrConfig:
    """What `vision_config` says; the defaults are the published values."""

    image_size: int = 1024
    sam_width: int = 768
    sam_layers: int = 12
    sam_heads: int = 12
    sam_global: tuple[int, ...] = (2, 5, 8, 11)
    sam_channels: tuple[int, ...] = (512, 1024)
    clip_width: int = 1024
    clip_layers: int = 24
    clip_heads: int = 16
    clip_image_size: int = 224
    clip_patch_size: int = 14
    out_hidden_size: int

    @property
    def head_dim(self) -> int:
        return self.sam_width // self.sam_heads

    @property
    def sam_side(self) -> int:
        """Patches along one side of a whole view."""
        return self.image_size // SAM_PATCH

    @property
    def clip_side(self) -> int:
        """Side of CLIP's position table."""
        return self.clip_image_size // self.clip_patch_size


def read_config(config: Mapping[str, Any]) -> DeepseekOcrConfig:
    """The tower's part of a parsed config.json. Raises ModelError."""
    vision, projector = config.get("vision_config") or {}, config.get("projector_config") or {}
    widths = vision.get("width") or {}
    sam, clip = widths.get(SAM) or {}, widths.get(CLIP) or {}
    text = config.get("language_config") or config.get("text_config") or {}
    given = {
        "image_size": vision.get("image_size"),
        "sam_width": sam.get("width"),
        "sam_layers": sam.get("layers"),
        "sam_heads": sam.get("heads"),
        "sam_global": sam.get("global_attn_indexes"),
        "sam_channels": sam.get("downsample_channels"),
        "clip_width": clip.get("width"),
        "clip_layers": clip.get("layers"),
        "clip_heads": clip.get("heads"),
        "clip_image_size": clip.get("image_size"),
        "clip_patch_size": clip.get("patch_size"),
        "out_hidden_size": projector.get("n_embed") or text.get("hidden_size") or config.get("hidden_size"),
    }
    values: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    for key, value in values.items():
        numbers, least = value if isinstance(value, list) else [value], 0 if key == "sam_global" else 1
        if not all(type(number) is int and number >= least for number in numbers):
            raise ModelError(f"config.json: {key} is {value!r}, must be whole numbers from {least} on")
        values[key] = tuple(value) if isinstance(value, list) else value
    if "out_hidden_size" not in values:
        raise ModelError("config.json: neither projector_config.n_embed nor hidden_size says how wide rows are")
    parsed = DeepseekOcrConfig(**values)
    if projector.get("projector_type", "linear") != "linear":
        raise ModelError(f"config.json: projector_type is {projector['projector_type']!r}, this model's is 'linear'")
    if len(parsed.sam_channels) != 2 or parsed.sam_channels[1] != parsed.clip_width:
        raise ModelError(
            f"config.json: downsample_channels are {list(parsed.sam_channels)}, must be two, the second CLIP's width "
            f"{parsed.clip_width}"
        )
    for name, width, heads in (
        (SAM, parsed.sam_width, parsed.sam_heads),
        (CLIP, parsed.clip_width, parsed.clip_heads),
    ):
        if width % heads:
            raise ModelError(f"config.json: width {width} of {name} must be a multiple of its {heads} heads")
    return parsed


class RelativePositions:
    """Decomposed relative positions of a square of `side` patches as more numbers of queries and keys.

    A score gets q . R_h[row of q - row of k] + q . R_w[column of q - column of k], q unscaled. With these products
    behind each query, by row and by column, and with ones at its own row and column behind each key, a plain product
    says the same, and no matrix of side^2 x side^2 is made.
    """

    def __init__(self, table_h: torch.Tensor, table_w: torch.Tensor, side: int) -> None:
        """Tables [2 x side - 1, head_dim], after their resize."""
        place = torch.arange(side, device=table_h.device)
        apart = place[:, None] - place[None, :] + side - 1
        self.by_row, self.by_column = table_h[apart], table_w[apart]  # [side, side, head_dim]
        one = torch.eye(side, dtype=table_h.dtype, device=table_h.device)
        row, column = one.repeat_interleave(side, 0), one.repeat(side, 1)
        self.at = torch.cat([row, column], dim=1)  # [side^2, 2 x side]
        self.side = side

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Of q [n, heads, side^2, head_dim], unscaled, what stands behind it: [n, heads, side^2, 2 x side]."""
        square = q.unflatten(2, (self.side, self.side))
        rows = torch.einsum("nhrcd,rkd->nhrck", square, self.by_row)
        columns = torch.einsum("nhrcd,ckd->nhrck", square, self.by_column)
        return torch.cat([rows, columns], dim=-1).flatten(2, 3)

    def keys(self, k: torch.Tensor) -> torch.Tensor:
        """What stands behind k [n, heads, side^2, head_dim]."""
        return self.at.expand(*k.shape[:2], -1, -1)


def resized_line(table: torch.Tensor, length: int) -> torch.Tensor:
    """A table [n, width] of relative positions for another side, linearly along n, in float32."""
    if table.shape[0] == length:
        return table
    line = F.interpolate(table.float().T[None], size=length, mode="linear")
    return line[0].T.to(table.dtype)


class SamBlock:
    """Pre-norm attention, in windows or over all patches, and MLP."""

    def __init__(
        self,
        source: TensorSource,
        name: str,
        config: DeepseekOcrConfig,
        whole: bool,
        sides: Sequence[int],
        stream: Stream,
    ) -> None:
        width, self.heads, self.whole = config.sam_width, config.sam_heads, whole
        table = 2 * (config.sam_side if whole else WINDOW) - 1
        self.norm1 = stream.read_by(LayerNorm.take(source, f"{name}.norm1", width, eps=1e-6))
        self.qkv = Linear.take(source, f"{name}.attn.qkv", width, 3 * width)
        self.out = stream.joined_by(Linear.take(source, f"{name}.attn.proj", width, width))
        self.norm2 = stream.read_by(LayerNorm.take(source, f"{name}.norm2", width, eps=1e-6))
        self.fc1 = Linear.take(source, f"{name}.mlp.lin1", width, MLP_RATIO * width)
        self.fc2 = stream.joined_by(Linear.take(source, f"{name}.mlp.lin2", MLP_RATIO * width, width))
        by_h, by_w = (source.take(f"{name}.attn.rel_pos_{axis}", table, config.head_dim) for axis in "hw")
        self.relative = {
            side: RelativePositions(resized_line(by_h, 2 * side - 1), resized_line(by_w, 2 * side - 1), side)
            for side in (sides if whole else [WINDOW])
        }

    def __call__(self, x: torch.Tensor) -> None:
        """Add to `x` [n, side, side, width] where it lies."""
        normed = self.norm1(x)
        self.out.onto(x, self._attend(normed) if self.whole else self._in_windows(normed))
        self.fc2.onto(x, F.gelu(self.fc1(self.norm2(x))))

    def _in_windows(self, x: torch.Tensor) -> torch.Tensor:
        """Zeros fill the last windows; they are keys like any other, as officially."""
        n, side, _, width = x.shape
        more = -side % WINDOW
        count = (side + more) // WINDOW
        x = F.pad(x, (0, 0, 0, more, 0, more)).view(n, count, WINDOW, count, WINDOW, width)
        x = self._attend(x.transpose(2, 3).reshape(-1, WINDOW, WINDOW, width))
        x = x.view(n, count, count, WINDOW, WINDOW, width).transpose(2, 3).reshape(n, side + more, side + more, width)
        return x[:, :side, :side]

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        n, side, _, width = x.shape
        q, k, v = self.qkv(x).view(n, side * side, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        relative, scale = self.relative[side], q.shape[-1] ** -0.5
        q = torch.cat([q * scale, relative.queries(q)], dim=-1)
        k = torch.cat([k, relative.keys(k)], dim=-1)
        # Values are padded to the same multiple of 8: kernels that keep no scores want one head size for q, k and v,
        # and without one of them a whole view's scores are 12 x 4096^2 numbers.
        head, wide = v.shape[-1], -(-q.shape[-1] // 8) * 8
        q, k, v = (F.pad(part, (0, wide - part.shape[-1])) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, scale=1.0)[..., :head]
        return attended.transpose(1, 2).reshape(n, side, side, width)


class Sam:
    """Patches to tokens [n, tokens, tokens, channels], tokens a quarter of the patches along a side."""

    def __init__(self, source: TensorSource, config: DeepseekOcrConfig, sides: Sequence[int]) -> None:
        """`sides` are those of views, in patches."""
        width, (middle, out) = config.sam_width, config.sam_channels
        weight = source.take("sam_model.patch_embed.proj.weight", width, 3, SAM_PATCH, SAM_PATCH)
        bias = source.take("sam_model.patch_embed.proj.bias", width)
        self.patch_embed = Linear(weight.permute(0, 2, 3, 1).reshape(width, -1).contiguous(), bias)
        table = source.take("sam_model.pos_embed", 1, config.sam_side, config.sam_side, width)[0]
        self.positions = {side: resized_square(table, side) for side in sides}
        stream = Stream()
        self.blocks = [
            SamBlock(source, f"sam_model.blocks.{i}", config, i in config.sam_global, sides, stream)
            for i in range(config.sam_layers)
        ]
        self.stream = stream
        self.neck1 = source.take("sam_model.neck.0.weight", NECK, width, 1, 1)
        self.norm1 = LayerNorm.take(source, "sam_model.neck.1", NECK, eps=1e-6)
        self.neck2 = source.take("sam_model.neck.2.weight", NECK, NECK, 3, 3)
        self.norm2 = LayerNorm.take(source, "sam_model.neck.3", NECK, eps=1e-6)
        self.down1 = source.take("sam_model.net_2.weight", middle, NECK, 3, 3)
        self.down2 = source.take("sam_model.net_3.weight", out, middle, 3, 3)

    def __call__(self, patches: torch.Tensor) -> torch.Tensor:
        """Normalised patches [n, side, side, 16 x 16 x 3]."""
        x = self.patch_embed(patches) + self.positions[patches.shape[1]]
        for block in self.blocks:
            block(x)
        x = self.norm1(F.linear(self.stream.settled(x), self.neck1.flatten(1)))
        x = self.norm2(F.conv2d(x.permute(0, 3, 1, 2), self.neck2, padding=1).permute(0, 2, 3, 1))
        x = F.conv2d(x.permute(0, 3, 1, 2), self.down1, stride=2, padding=1)
        return F.conv2d(x, self.down2, stride=2, padding=1).permute(0, 2, 3, 1)


class ClipBlock:
    """Pre-norm attention and MLP."""

    def __init__(self, source: TensorSource, name: str, config: DeepseekOcrConfig, stream: Stream) -> None:
        width, self.heads = config.clip_width, config.clip_heads
        self.norm1 = stream.read_by(LayerNorm.take(source, f"{name}.layer_norm1", width, eps=1e-5))
        self.qkv = Linear.take(source, f"{name}.self_attn.qkv_proj", width, 3 * width)
        self.out = stream.joined_by(Linear.take(source, f"{name}.self_attn.out_proj", width, width))
        self.norm2 = stream.read_by(LayerNorm.take(source, f"{name}.layer_norm2", width, eps=1e-5))
        self.fc1 = Linear.take(source, f"{name}.mlp.fc1", width, MLP_RATIO * width)
        self.fc2 = stream.joined_by(Linear.take(source, f"{name}.mlp.fc2", MLP_RATIO * width, width))

    def __call__(self, x: torch.Tensor) -> None:
        """Add to `x` [n, rows, width] where it lies."""
        self.out.onto(x, attend(self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1))))
        self.fc2.onto(x, kernels.quick_gelu(self.fc1(self.norm2(x))))


class DeepseekOcrTower:
    """See `base.Tower`. Lines are the tokens of the views in raster order; newline and separator are constant rows.

    All views of a path are of one size, so attention is dense over [views, rows] and views that nobody asked for touch
    no other.
    """

    prefixes: ClassVar[Mapping[str, str]] = {
        name: name for name in ("sam_model.", "vision_model.", "projector.", "image_newline", "view_seperator")
    }
    constant_rows: torch.Tensor

    def __init__(
        self, config: DeepseekOcrConfig, planner: DeepseekOcrPlanner, source: TensorSource, backend: AttentionBackend
    ) -> None:
        """Take all weights from `source`. Raises ModelError for a missing or misshapen one."""
        self.planner, self.device, self.dtype = planner, source.device, source.dtype
        self.pixel_sides = {path: views.side for path, views in planner.views.items()}
        self.token_sides = {GLOBAL: planner.whole_tokens, LOCAL: planner.crop_tokens}
        sides = sorted({side // SAM_PATCH for side in self.pixel_sides.values()})
        self.sam = Sam(source, config, sides)
        width, side, patch = config.clip_width, config.clip_side, config.clip_patch_size
        source.take("vision_model.embeddings.patch_embedding.weight", width, 3, patch, patch)  # CLIP's own, of no use
        table = source.take("vision_model.embeddings.position_embedding.weight", side**2 + 1, width)
        self.class_row = source.take("vision_model.embeddings.class_embedding", width) + table[0]
        square = table[1:].view(side, side, width)
        self.positions = {tokens: resized_square(square, tokens).flatten(0, 1) for tokens in self.token_sides.values()}
        self.norm_before = LayerNorm.take(source, "vision_model.pre_layrnorm", width, eps=1e-5)
        layers = "vision_model.transformer.layers"
        stream = Stream()
        self.blocks = [ClipBlock(source, f"{layers}.{i}", config, stream) for i in range(config.clip_layers)]
        self.stream = stream
        self.projector = Linear.take(source, "projector.layers", 2 * width, config.out_hidden_size)
        rows = [source.take(name, config.out_hidden_size) for name in ("image_newline", "view_seperator")]
        self.constant_rows = torch.stack(rows)
        self.mean = torch.tensor([0.5, 0.5, 0.5], device=self.device) * 255

    read_config = staticmethod(read_config)

    @classmethod
    def build_planner(
        cls, architecture: str, config: DeepseekOcrConfig, processor: Mapping[str, Any]
    ) -> DeepseekOcrPlanner:
        """The planner of this configuration and processor. Raises ProcessorError."""
        settings = {**PROCESSOR, **{key: processor[key] for key in PROCESSOR if processor.get(key) is not None}}
        if settings["crop_mode"] is not True:
            raise ProcessorError(f"crop_mode is {settings['crop_mode']!r}, must be true: crops are always seen too")
        for key in ("image_mean", "image_std"):
            if read_channels(settings, key) != (0.5, 0.5, 0.5):
                raise ProcessorError(f"{key} is {settings[key]!r}, this model's is 0.5 everywhere")
        base, crop, most = (settings[key] for key in ("base_size", "image_size", "max_crops"))
        for key, value in (("base_size", base), ("image_size", crop)):
            if type(value) is not int or value < SAM_PATCH or value % SAM_PATCH:
                raise ProcessorError(f"{key} is {value!r}, must be a multiple of the {SAM_PATCH} pixels of a patch")
        if type(most) is not int or most < 2:
            raise ProcessorError(f"max_crops is {most!r}, must be a whole number from 2 on")
        assert isinstance(base, int)
        assert isinstance(crop, int)
        layout = Layout(config.out_hidden_size, 0)
        return DeepseekOcrPlanner(architecture, layout, whole=base, crop=crop, most=most)

    def buffers(self, path: str, capacity: Capacity) -> dict[str, BufferSpec]:
        """See `base.Tower.buffers`."""
        return {PIXELS: BufferSpec((capacity.units * self.planner.views[path].nbytes,), "uint8")}

    def fill(self, path: str, parts: Sequence[ItemPlan], out: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """See `base.Tower.fill`. There is nothing to say beside the pixels."""

    def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        """See `base.Tower.forward`: [units x tokens of a view, out_hidden_size]."""
        views, side = capacity.units, self.pixel_sides[path] // SAM_PATCH
        ordered = buffers[PIXELS].view(views, side, SAM_PATCH, side, SAM_PATCH, 3).transpose(2, 3)
        patches = ((ordered.float() - self.mean) / self.mean).to(self.dtype).flatten(3)
        seen = self.sam(patches).flatten(1, 2)
        rows = torch.cat([self.class_row.expand(views, 1, -1), seen + self.positions[self.token_sides[path]]], dim=1)
        x = self.norm_before(rows)
        for block in self.blocks:
            block(x)
        return self.projector(torch.cat([self.stream.settled(x)[:, 1:], seen], dim=-1)).flatten(0, 1)

    def gather_index(self, parts: Sequence[ItemPlan], lines: Mapping[str, int]) -> npt.NDArray[np.int32]:
        """See `base.Tower.gather_index`: the lines of the crops as one picture, the whole view, the separator."""
        newline = lines[GLOBAL] + lines[LOCAL]
        whole, local, index = 0, lines[GLOBAL], []
        for part in parts:
            rows, columns = self.planner.crops_of(part)
            for tall, wide, side, begin in (
                (rows, columns, self.planner.crop_tokens, local),
                (1, 1, self.planner.whole_tokens, whole),
            ):
                picture = laid_out(tall, wide, side)
                index.append(np.where(picture < 0, newline, picture + begin))
            index.append(np.array([newline + 1]))
            whole += self.planner.whole_tokens**2
            local += rows * columns * self.planner.crop_tokens**2
        return np.concatenate(index).astype(np.int32)


@functools.lru_cache(maxsize=256)
def laid_out(rows: int, columns: int, side: int) -> npt.NDArray[np.int64]:
    """The tokens of rows x columns views in the raster order of the whole picture, -1 at the end of each line."""
    tokens = np.arange(rows * columns * side**2).reshape(rows, columns, side, side)
    picture = tokens.swapaxes(1, 2).reshape(rows * side, columns * side)
    lines = np.pad(picture, ((0, 0), (0, 1)), constant_values=-1).reshape(-1)
    lines.setflags(write=False)
    return lines
