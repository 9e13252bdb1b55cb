"""Kimi-VL: MoonViT at the image's own resolution, a bicubically resized position table, 2 x 2 merge and an MLP.

Forward as in the authors' code, whose tower is transformers' Kimi_K25VisionModel for single frames, with its rotary
embedding in pairs of neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from .. import kernels
from ..attention.base import AttentionBackend
from ..types import Capacity, Layout
from .base import PlanError
from .config import GridConfig, ModelError, read_grid_config
from .grid import GridPlanner
from .grid_tower import Frame, GridTower
from .layers import GeluMLP, LayerNorm, Linear, PatchEmbed, Rope, Segments, Stream
from .patches import RasterFormat
from .processor import PLAIN, ProcessorClass, ProcessorError, read_channels, read_settings, require
from .resize import pillow_bicubic
from .table import TablePositions
from .weights import TensorSource

PROCESSOR = ProcessorClass(
    types=("KimiVLImageProcessor",),
    defaults={
        **PLAIN,
        "patch_size": 14,
        "merge_kernel_size": [2, 2],
        "in_token_limit": 4096,
        "num_pooled_tokens": 1024,
        "pad_input": False,
    },
)

MAX_PATCHES = 512
"""Sides of this many patches and more are refused: the rotary embedding's table ends there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiVLConfig(GridConfig):
    """`vision_config` with the class defaults of MoonViTConfig, and the language model's width."""

    KEYS: ClassVar[Mapping[str, str]] = {
        "depth": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "table_side": "init_pos_emb_height",
        "out_hidden_size": "text_config.hidden_size",
    }

    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_heads: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    patch_size: int = 14
    temporal_patch_size: int = 1
    table_side: int = 64

    def check(self) -> None:
        """See GridConfig."""
        GridConfig.check(self)
        self.check_activation("gelu_pytorch_tanh")


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSize:
    """An image keeps its size unless it has more than `limit` patches; then it is padded to whole tokens, in black.

    The authors' KimiVLImageProcessor with pad_input: patches are counted as whole ones, sides are cut off to pixels.
    """

    patch: int
    merge: int
    limit: int

    def __call__(self, height: int, width: int) -> tuple[int, int]:
        """See grid.ResizeRule."""
        factor = self.patch * self.merge
        scaled = self.scaled(height, width)
        rows, columns = (-(-max(side, 1) // factor) for side in scaled)
        if max(rows, columns) * self.merge >= MAX_PATCHES:
            raise PlanError(
                f"the image is {height} x {width} pixels (height x width), {rows * self.merge} x "
                f"{columns * self.merge} patches: this model takes fewer than {MAX_PATCHES} a side; crop or shrink it"
            )
        return rows * factor, columns * factor

    def scaled(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the picture, before it is padded."""
        patches = (width // self.patch) * (height // self.patch)
        if patches <= self.limit:
            return height, width
        scale = math.sqrt(self.limit / patches)
        return int(height * scale), int(width * scale)

    @property
    def max_tokens(self) -> int:
        """See grid.ResizeRule. What is cut off whole patches, and then padded, adds most to a strip of full length."""
        longest = MAX_PATCHES - 1
        shortest = max(1, self.limit // longest)
        rows, columns = longest // self.merge, shortest + 2
        square = math.isqrt(self.limit) + 2 * self.merge
        return max(rows * columns // self.merge + rows, (square // self.merge + 1) ** 2)

    def lay(self, media: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
        """See resize.Resize: the picture in the upper left, black elsewhere."""
        height, width = self.scaled(*media.shape[:2])
        picture = media
        if (height, width) != media.shape[:2]:
            picture = np.empty((height, width, 3), np.uint8)
            pillow_bicubic(media, picture)
        target[...] = 0
        target[:height, :width] = picture


class Block:
    """Pre-norm residual attention and MLP."""

    def __init__(
        self, source: TensorSource, name: str, config: KimiVLConfig, backend: AttentionBackend, stream: Stream
    ) -> None:
        width, layers = config.hidden_size, (f"{name}.mlp.fc0", f"{name}.mlp.fc1")
        self.heads, self.backend = config.num_heads, backend
        self.norm0 = stream.read_by(LayerNorm.take(source, f"{name}.norm0", width, eps=1e-5))
        self.qkv = Linear.take(source, f"{name}.wqkv", width, 3 * width)
        self.out = stream.joined_by(Linear.take(source, f"{name}.wo", width, width))
        self.norm1 = stream.read_by(LayerNorm.take(source, f"{name}.norm1", width, eps=1e-5))
        self.mlp = GeluMLP.take(source, layers, width, config.intermediate_size, stream)

    def __call__(self, x: torch.Tensor, turns: torch.Tensor, segments: Segments) -> None:
        """Add to `x` where it lies."""
        rows, (cu, longest) = x.shape[0], (segments.cu, segments.longest)
        qkv = self.qkv(self.norm0(x)).view(rows, 3, self.heads, -1)
        kernels.rotate_(qkv, turns, cu)
        q, k, v = qkv.unbind(1)
        self.out.onto(x, self.backend.attend(q, k, v, cu, cu, longest, longest, rows).flatten(1))
        self.mlp.onto(x, self.norm1(x))


class KimiVLTower(GridTower):
    """See `base.Tower`. Lines are tokens in the order of the items."""

    config_class = KimiVLConfig
    processor_class = PROCESSOR
    prefixes: ClassVar[Mapping[str, str]] = {"multi_modal_projector.": "projector.", "vision_tower.": ""}

    def __init__(
        self, config: KimiVLConfig, planner: GridPlanner, source: TensorSource, backend: AttentionBackend
    ) -> None:
        """Take all weights from `source`. Raises ModelError for a missing or misshapen one."""
        super().__init__(planner, source)
        width, side, merged = config.hidden_size, config.table_side, config.merged_size
        self.patch_embed = PatchEmbed(source, planner, width, bias=True, frames=False)
        table = source.take("patch_embed.pos_emb.weight", side, side, width)
        self.positions = TablePositions(table.flatten(0, 1), side)
        self.row_buffers = {**self.row_buffers, **self.positions.row_buffers}
        self.rope = Rope(config.head_dim, config.rope_theta, source.device)
        stream = Stream()
        self.blocks = [Block(source, f"encoder.blocks.{i}", config, backend, stream) for i in range(config.depth)]
        self.norm = stream.read_by(LayerNorm.take(source, "encoder.final_layernorm", width, eps=1e-5))
        self.out_norm = LayerNorm.take(source, "projector.pre_norm", width, eps=1e-5)
        self.fc1 = Linear.take(source, "projector.linear_1", merged, merged)
        self.fc2 = Linear.take(source, "projector.linear_2", merged, config.out_hidden_size)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> KimiVLConfig:
        """See GridTower."""
        vision = dict(config.get("vision_config") or {})
        merge, sides = vision.get("merge_kernel_size", [2, 2]), ("init_pos_emb_height", "init_pos_emb_width")
        if not isinstance(merge, list) or len(merge) != 2 or merge[0] != merge[1]:
            raise ModelError(f"vision_config.merge_kernel_size is {merge!r}, only squares are supported")
        if vision.get(sides[0], 64) != vision.get(sides[1], 64):
            raise ModelError(f"vision_config.{sides[1]} is {vision.get(sides[1])!r}, must be that of {sides[0]}")
        return read_grid_config(KimiVLConfig, {**config, "vision_config": {**vision, "spatial_merge_size": merge[0]}})

    @classmethod
    def build_planner(cls, architecture: str, config: GridConfig, processor: Mapping[str, Any]) -> GridPlanner:
        """See GridTower."""
        settings, merge = read_settings(processor, PROCESSOR), config.spatial_merge_size
        of_tower = "it must be that of the tower in config.json"
        require(settings, "do_normalize", True, "pixels are always normalised")
        require(settings, "patch_size", config.patch_size, of_tower)
        require(settings, "merge_kernel_size", [merge, merge], of_tower)
        require(settings, "pad_input", True, "images are padded to whole tokens, never cropped")
        limit = settings["in_token_limit"]
        if type(limit) is not int or limit < 1:
            raise ProcessorError(f"in_token_limit is {limit!r}, must be a positive whole number")
        rule = NativeSize(patch=config.patch_size, merge=merge, limit=limit)
        return GridPlanner(
            architecture=architecture,
            layout=Layout(config.out_hidden_size, 0),
            patch=config.patch_size,
            merge=merge,
            temporal_patch=1,
            resize=rule,
            lay=rule.lay,
            mean=read_channels(settings, "image_mean"),
            std=read_channels(settings, "image_std"),
            patch_format=RasterFormat,
            positions=MAX_PATCHES - 1,
        )

    def frame(self, h: int, w: int) -> Frame:
        """See `GridTower.frame`; adds where each patch lies in the position table."""
        frame = super().frame(h, w)
        return replace(frame, rows={**frame.rows, **self.positions.rows(h, w, frame.rows["position"])})

    def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        """See `base.Tower.forward`: [units, out_hidden_size]."""
        x = self.patch_embed(buffers)
        x = self.positions(x, buffers)
        turns = self._turns(buffers["position"])
        segments = Segments(buffers["cu_frames"], capacity.longest)
        for block in self.blocks:
            block(x, turns, segments)
        tokens = self.out_norm(self.norm(x)).view(-1, self.fc1.weight.shape[1])
        return self.fc2(F.gelu(self.fc1(tokens)))

    def _turns(self, position: torch.Tensor) -> torch.Tensor:
        """As Rope's, but column and row by turns: of the pairs of a head the even ones turn with the column."""
        rows, columns = self.rope.turns(position).chunk(2, dim=-1)
        return torch.stack([columns, rows], dim=-1).flatten(-2)
