"""MiniCPM-V 2.5, 2.6 and 4.0: SigLIP over slices of an image, then a resampler of a fixed number of queries a slice.

Forward as in the authors' code run on one slice at a time: in 2.5 that code lets the slices of a batch see each other's
padding, which would make a slice depend on its neighbours. Position ids are exact, where that code's sums of float32
lose one at a few sides (25 patches are the fewest).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from .. import kernels
from ..attention.base import AttentionBackend
from ..types import Capacity, ItemPlan, Layout
from .base import PIXELS, BufferSpec
from .clip import ClipRule, EachFrame, SampledClips
from .config import ModelError, read_grid_config
from .grid_tower import write_offsets
from .layers import LayerNorm, Linear, Segments, Stream, normalised_levels
from .processor import PLAIN, ProcessorClass, ProcessorError, read_channels, read_settings, require
from .sampling import FrameSampler, SamplingSettings, minicpmv
from .siglip import Block
from .slices import SlicePlanner, SliceRule
from .tile_tower import TileConfig, patch_linear
from .tiles import NO_VIDEOS
from .weights import TensorSource

OF_PROMPTS = (
    "im_start", "im_end", "im_id_start", "im_id_end", "slice_start", "slice_end", "unk", "use_image_id", "version"
)  # fmt: skip
PROCESSOR = ProcessorClass(
    types=("MiniCPMVImageProcessor",),
    defaults={
        **{key: value for key, value in PLAIN.items() if not key.startswith("image_")},
        **dict.fromkeys(OF_PROMPTS),
        "max_slice_nums": 9,
        "scale_resolution": 448,
        "patch_size": 14,
        "image_feature_size": 64,
        "slice_mode": True,
        "norm_mean": [0.5] * 3,
        "norm_std": [0.5] * 3,
    },
)

HEAD = 128
"""Width of a head of the resampler, whatever its own width."""

FRAME_SLICES = 2
"""Cells that a video's frame may be cut into: the authors' number. (vLLM takes 1, never a cell.)"""

SAMPLER = FrameSampler(
    rule=minicpmv,
    settings=SamplingSettings(fps=1.0, max_frames=64, temporal_patch=1),
    overrides=frozenset({"fps", "num_frames", "max_frames"}),
    enabled=True,
)
"""The authors' code has a frame a second, at most 64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCPMVConfig(TileConfig):
    """`vision_config`, and what of the rest the tower depends on. `image_size` is that of the position table.

    Sizes have no defaults: those of the classes are not those of the checkpoints.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    hidden_act: str = "gelu_pytorch_tanh"
    image_size: int
    patch_size: int
    spatial_merge_size: int = 1
    layer_norm_eps: float = 1e-6
    queries: int = 1
    strip: bool = False  # 2.5: positions are those of one row of all patches
    drop_last: bool = False  # the file has one block less

    def check(self) -> None:
        """See GridConfig."""
        TileConfig.check(self)
        self.check_activation("gelu_pytorch_tanh")
        if self.out_hidden_size % HEAD:
            raise ModelError(f"hidden_size is {self.out_hidden_size}, must be a multiple of {HEAD}, a resampler's head")


class Resampler:
    """Learned queries that attend to the patches of a slice: positions are added to keys alone."""

    def __init__(self, source: TensorSource, config: MiniCPMVConfig, backend: AttentionBackend) -> None:
        width, queries = config.out_hidden_size, config.queries
        self.backend, self.heads = backend, width // HEAD
        # Computed on the CPU: the last bit of these powers then does not depend on the device.
        quarter = torch.arange(width // 4, dtype=torch.float32) / (width // 4)
        self.frequencies = (1.0 / 10000**quarter).to(source.device)
        self.kv_proj = Linear.take(source, "resampler.kv_proj", config.hidden_size, width, bias=False)
        self.norm_kv, norm_q, self.norm_out = (
            LayerNorm.take(source, f"resampler.{name}", width) for name in ("ln_kv", "ln_q", "ln_post")
        )
        weights = source.take("resampler.attn.in_proj_weight", 3 * width, width).chunk(3)
        biases = source.take("resampler.attn.in_proj_bias", 3 * width).chunk(3)
        project_q, self.k, self.v = map(Linear, weights, biases)
        self.queries = project_q(norm_q(source.take("resampler.query", queries, width)))
        self.out = Linear.take(source, "resampler.attn.out_proj", width, width)
        self.proj = Linear(source.take("resampler.proj", width, width).T.contiguous(), None)

    def __call__(
        self, x: torch.Tensor, position: torch.Tensor, slices: Segments, cu_queries: torch.Tensor
    ) -> torch.Tensor:
        """Of patches [rows, hidden_size] at `position` int32 [rows, 2] the tokens [segments x queries, width]."""
        kv = self.norm_kv(self.kv_proj(x))
        k = self.k(kv + self._encoded(position, x.dtype)).unflatten(1, (self.heads, HEAD))
        v = self.v(kv).unflatten(1, (self.heads, HEAD))
        kernels.clear_tail_(slices.cu, v)
        segments, queries = len(cu_queries) - 1, len(self.queries)
        q = self.queries.repeat(segments, 1).unflatten(1, (self.heads, HEAD))
        attended = self.backend.attend(q, k, v, cu_queries, slices.cu, queries, slices.longest, len(q))
        return self.proj(self.norm_out(self.out(attended.flatten(1))))

    def _encoded(self, position: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Sines and cosines of the column, then of the row, [rows, width]: computed in float32, for any side."""
        angles = position.flip(1).float().unsqueeze(-1) * self.frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype).flatten(1)


class MiniCPMVTower:
    """See `base.Tower`. Lines are the queries of the slices in their order, as many for every segment."""

    prefixes: ClassVar[Mapping[str, str]] = {"resampler.": "resampler.", "vpm.": ""}
    """See `weights.open_tensors`."""
    constant_rows: torch.Tensor | None = None

    def __init__(
        self, config: MiniCPMVConfig, planner: SlicePlanner, source: TensorSource, backend: AttentionBackend
    ) -> None:
        """Take all weights from `source`. Raises ModelError for a missing or misshapen one."""
        self.planner, self.device, self.dtype = planner, source.device, source.dtype
        self.side, self.strip = config.grid_side, config.strip
        self.levels = normalised_levels(config.patch_size, source.device, planner.mean, planner.std)
        self.patch_embed = patch_linear(source, "embeddings.patch_embedding", config)
        self.table = source.take("embeddings.position_embedding.weight", self.side**2, config.hidden_size)
        eps = config.layer_norm_eps
        depth = config.depth - config.drop_last
        stream = Stream()
        self.blocks = [Block(source, f"encoder.layers.{i}", config, eps, backend, stream) for i in range(depth)]
        self.norm = stream.read_by(LayerNorm.take(source, "post_layernorm", config.hidden_size, eps))
        self.resampler = Resampler(source, config, backend)
        source.skip("head.")  # a pooling that no version uses
        source.skip("resampler.pos_embed")  # what `Resampler` computes, in some older files

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> MiniCPMVConfig:
        """The tower's part of a parsed config.json. Raises ModelError, also for another version than 2.5, 2.6 and 4.0.

        As in vLLM, a file without a version is of 2.5, or of 2.0 by its sizes.
        """
        for key, kind in (("query_num", int), ("hidden_size", int), ("drop_vision_last_layer", bool)):
            if type(config.get(key)) is not kind:
                raise ModelError(f"config.json: {key} is {config.get(key)!r}, must be of type {kind.__name__}")
        old = (config["hidden_size"], config["query_num"]) == (2304, 64)
        version = str(config.get("version") or ("2.0" if old else "2.5"))
        if version not in ("2.5", "2.6", "4.0"):
            raise ModelError(f"config.json: version is {version}, supported are MiniCPM-V 2.5, 2.6 and 4.0")
        vision = {
            **(config.get("vision_config") or {}),
            "queries": config["query_num"],
            "strip": version == "2.5",
            "drop_last": config["drop_vision_last_layer"],
        }
        return read_grid_config(MiniCPMVConfig, {**config, "text_config": None, "vision_config": vision})

    @classmethod
    def build_planner(cls, architecture: str, config: MiniCPMVConfig, processor: Mapping[str, Any]) -> SlicePlanner:
        """The planner of this configuration and processor. Raises ProcessorError."""
        settings = read_settings(processor, PROCESSOR)
        require(settings, "patch_size", config.patch_size, "it must be that of the tower in config.json")
        require(settings, "image_feature_size", config.queries, "it must be query_num in config.json")
        require(settings, "slice_mode", True, "images are always resized to slices")
        side, most = (settings[key] for key in ("scale_resolution", "max_slice_nums"))
        if type(side) is not int or type(most) is not int or side < config.patch_size or most < 1:
            raise ProcessorError(
                f"scale_resolution is {side!r} and max_slice_nums is {most!r}, must be whole numbers, at least "
                f"{config.patch_size} and 1"
            )
        frames: SliceRule | None = None
        clips: ClipRule = NO_VIDEOS
        if not config.strip:
            frames = SliceRule(side=side, patch=config.patch_size, most=FRAME_SLICES)
            clips = SampledClips(sample=SAMPLER, resize=EachFrame(frames.whole), temporal_patch=1)
        return SlicePlanner(
            architecture=architecture,
            layout=Layout(config.out_hidden_size, 0),
            queries=config.queries,
            rule=SliceRule(side=side, patch=config.patch_size, most=most),
            mean=read_channels(settings, "norm_mean"),
            std=read_channels(settings, "norm_std"),
            frames=frames,
            most_frames=SAMPLER.settings.max_frames,
            clips=clips,
        )

    def buffers(self, path: str, capacity: Capacity) -> dict[str, BufferSpec]:
        """See `base.Tower.buffers`."""
        rows = capacity.units * self.planner.paths[path].rows_per_unit
        return {
            "cu_slices": BufferSpec((capacity.segments + 1,), "int32"),
            "cu_queries": BufferSpec((capacity.segments + 1,), "int32"),
            "position": BufferSpec((rows, 2), "int32"),
            "place": BufferSpec((rows,), "int32"),
            "origin": BufferSpec((rows, 1), "int32"),
            "stride": BufferSpec((rows,), "int32"),
            PIXELS: BufferSpec((rows * self.planner.patch**2 * 3,), "uint8"),
        }

    def fill(self, path: str, parts: Sequence[ItemPlan], out: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """See `base.Tower.fill`. Pad rows read the first line of the pixels, at position (0, 0)."""
        grids = np.array([grid for part in parts for grid in part.grids], np.int32).reshape(-1, 2)
        lengths = grids.prod(axis=1, dtype=np.int32)
        write_offsets(lengths, out["cu_slices"])
        write_offsets(np.full(len(grids), self.planner.queries, np.int32), out["cu_queries"])
        rows = int(lengths.sum())
        h, w = np.repeat(grids, lengths, axis=0).T
        first, length = np.repeat(np.stack([np.cumsum(lengths) - lengths, lengths]), lengths, axis=1)
        within = np.arange(rows, dtype=np.int32) - first
        row, column = np.divmod(within, w)
        out["position"][:rows] = np.stack([row, column], axis=1)
        if self.strip:
            out["place"][:rows] = within * self.side // length
        else:
            out["place"][:rows] = row * self.side // h * self.side + column * self.side // w
        out["origin"][:rows, 0] = (first + row * w) * self.planner.patch + column
        out["stride"][:rows] = w

    def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        """See `base.Tower.forward`: [segments x queries, out_hidden_size]."""
        x = self.patch_embed(self.levels(buffers, self.dtype)) + self.table.index_select(0, buffers["place"])
        slices = Segments(buffers["cu_slices"], capacity.longest)
        for block in self.blocks:
            block(x, slices)
        return self.resampler(self.norm(x), buffers["position"], slices, buffers["cu_queries"])

    def gather_index(self, parts: Sequence[ItemPlan], lines: Mapping[str, int]) -> npt.NDArray[np.int32]:
        """See `base.Tower.gather_index`."""
        return np.arange(sum(part.tokens for part in parts), dtype=np.int32)
