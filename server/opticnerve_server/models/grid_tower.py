"""What the towers of (t, h, w) grids share: their buffers and the closed forms that fill them.

Everything about an image's patches follows from (h, w), and is the same for every frame of a video: a `Frame`, computed
once, cached, and copied behind its neighbours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from ..types import Capacity, ItemPlan, Layout
from .base import PIXELS, BufferSpec
from .config import GridConfig, read_grid_config
from .grid import ClipResize, GridPlanner, StillResize
from .processor import QWEN2_VL, ProcessorClass
from .weights import TensorSource

Array = npt.NDArray[np.generic]

FRAME_CACHE_BYTES = 64 << 20
"""A 1344 x 1344 image of 14-pixel patches takes 0.2 MB of it, the largest published one 3 MB."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What one frame of h x w patches writes into the buffers, a pure function of (h, w)."""

    rows: dict[
        str, Array
    ]  # by buffer: [h * w, ...], in the order of the rows; "origin" counts from the frame's first line
    segments: dict[str, npt.NDArray[np.int32]]  # by buffer of cumulative lengths: the rows of each segment
    inverse: npt.NDArray[np.int32]  # [tokens]: where in the order of the rows each token of the frame lies

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (*self.rows.values(), *self.segments.values(), self.inverse))


def patch_positions(h: int, w: int, merge: int) -> npt.NDArray[np.int32]:
    """Row and column of every patch, int32 [h * w, 2]: token by token in raster order, and so within each."""
    shape = (h // merge, w // merge, merge, merge)
    row = np.arange(h, dtype=np.int32).reshape(h // merge, 1, merge, 1)
    column = np.arange(w, dtype=np.int32).reshape(1, w // merge, 1, merge)
    return np.stack([np.broadcast_to(row, shape).ravel(), np.broadcast_to(column, shape).ravel()], axis=1)


def write_offsets(lengths: npt.NDArray[np.int32], out: Array) -> None:
    """Cumulative lengths into int32 `out`, from 0, the last repeated up to its end."""
    out[0] = 0
    count = len(lengths)
    np.add.accumulate(lengths, dtype=np.int32, out=out[1 : count + 1])
    out[count + 1 :] = out[count]


class GridTower(ABC):
    """Base of the towers with one path over (t, h, w) grids; see `base.Tower`. Subclasses add to `frame`."""

    config_class: ClassVar[type[GridConfig]]
    processor_class: ClassVar[ProcessorClass] = QWEN2_VL
    resize_rule: ClassVar[type[StillResize | ClipResize]] = StillResize
    fold: ClassVar[int] = 1
    """Temporal groups of a video that share their tokens."""
    prefixes: ClassVar[Mapping[str, str]] = {"visual.": ""}
    """See `weights.open_tensors`."""
    constant_rows: torch.Tensor | None = None

    row_buffers: Mapping[str, BufferSpec]
    """The buffers with a line a row, their shape without its first axis. Subclasses add theirs."""

    def __init__(self, planner: GridPlanner, source: TensorSource) -> None:
        self.planner = planner
        self.device = source.device
        self.dtype = source.dtype
        self.row_buffers = {
            "position": BufferSpec((2,), "int32"),
            "origin": BufferSpec((planner.temporal_patch,), "int32"),
            "stride": BufferSpec((), "int32"),
        }
        self._frames: OrderedDict[tuple[int, int], Frame] = OrderedDict()
        self._frame_bytes = 0

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> GridConfig:
        """The tower's part of a parsed config.json. Raises ModelError."""
        return read_grid_config(cls.config_class, config)

    @classmethod
    def build_planner(cls, architecture: str, config: GridConfig, processor: Mapping[str, Any]) -> GridPlanner:
        """The planner of this configuration and processor. Raises ProcessorError."""
        return GridPlanner.from_processor(
            processor,
            architecture=architecture,
            layout=Layout(config.out_hidden_size, config.deepstack_levels),
            patch=config.patch_size,
            merge=config.spatial_merge_size,
            temporal_patch=config.temporal_patch_size,
            kind=cls.processor_class,
            fold=cls.fold,
            resize_rule=cls.resize_rule,
        )

    @abstractmethod
    def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        """See `base.Tower.forward`; lines are tokens in the order of the rows, as many as the capacity's units."""

    def segment_buffers(self, capacity: Capacity) -> dict[str, int]:
        """The buffers of cumulative lengths and the most segments each can hold."""
        return {"cu_frames": capacity.segments}

    def frame(self, h: int, w: int) -> Frame:
        """The frame of a grid of h x w patches, tokens from left to right and top to bottom."""
        position = patch_positions(h, w, self.planner.merge)
        origin = position[:, 0] * (self.planner.patch * w) + position[:, 1]
        return Frame(
            rows={"position": position, "origin": origin, "stride": np.full(h * w, w, np.int32)},
            segments={"cu_frames": np.array([h * w], np.int32)},
            inverse=np.arange(h * w // self.planner.merge**2, dtype=np.int32),
        )

    def buffers(self, path: str, capacity: Capacity) -> dict[str, BufferSpec]:
        """See `base.Tower.buffers`. Pixels have room for `temporal_patch` different frames a row, as videos have."""
        rows = capacity.units * self.planner.merge**2
        specs = {name: BufferSpec((n + 1,), "int32") for name, n in self.segment_buffers(capacity).items()}
        for name, spec in self.row_buffers.items():
            specs[name] = BufferSpec((rows, *spec.shape), spec.dtype, spec.pad)
        specs[PIXELS] = BufferSpec((rows * self.planner.temporal_patch * self.planner.patch**2 * 3,), "uint8")
        return specs

    def fill(self, path: str, parts: Sequence[ItemPlan], out: Mapping[str, Array]) -> None:
        """See `base.Tower.fill`. Pad rows read the first line of the pixels, at position (0, 0)."""
        if not parts:
            return
        frames = self._frames_of(parts)
        rows = sum(len(frame.rows["position"]) for frame in frames)
        for name in self.row_buffers:
            if name != "origin":
                np.concatenate([frame.rows[name] for frame in frames], out=out[name][:rows])
        for name in frames[0].segments:
            write_offsets(np.concatenate([frame.segments[name] for frame in frames]), out[name])
        within = np.concatenate([frame.rows["origin"] for frame in frames])
        counts = [len(frame.rows["origin"]) for frame in frames]
        # Column by column: a sum that is broadcast over short rows takes twice as long.
        for column, first in enumerate(self._first_lines(path, parts).T):
            np.add(within, np.repeat(first, counts), out=out["origin"][:rows, column])

    def gather_index(self, parts: Sequence[ItemPlan], lines: Mapping[str, int]) -> npt.NDArray[np.int32]:
        """See `base.Tower.gather_index`."""
        if not parts:
            return np.zeros(0, np.int32)
        frames = self._frames_of(parts)
        tokens = [len(frame.inverse) for frame in frames]
        first = np.repeat(np.cumsum([0, *tokens[:-1]], dtype=np.int32), tokens)
        return np.concatenate([frame.inverse for frame in frames]) + first

    def _first_lines(self, path: str, parts: Sequence[ItemPlan]) -> npt.NDArray[np.int32]:
        """First line of each frame of each temporal group, int32 [groups, temporal_patch].

        A still's one frame, and the last one of a video with too few, serves for those that are missing.
        """
        patch, group = self.planner.patch, self.planner.temporal_patch
        lines: list[int] = []
        begin = 0
        for part in parts:
            frame_lines = part.height * part.width // patch
            stored = part.paths[path].pixel_bytes // (part.height * part.width * 3)
            end = begin + stored * frame_lines
            missing = part.grid[0] * group - stored
            lines += [*range(begin, end, frame_lines), *[end - frame_lines] * missing]
            begin = end
        return np.array(lines, np.int32).reshape(-1, group)

    def _frames_of(self, parts: Sequence[ItemPlan]) -> list[Frame]:
        """The frame of every temporal group of every part, in order; frames of one size share one object."""
        return [frame for part in parts for frame in [self._cached_frame(*part.grid[1:])] * part.grid[0]]

    def _cached_frame(self, h: int, w: int) -> Frame:
        frame = self._frames.get((h, w))
        if frame is None:
            frame = self._frames[h, w] = self.frame(h, w)
            self._frame_bytes += frame.nbytes
            while self._frame_bytes > FRAME_CACHE_BYTES:
                self._frame_bytes -= self._frames.popitem(last=False)[1].nbytes
        else:
            self._frames.move_to_end((h, w))
        return frame
