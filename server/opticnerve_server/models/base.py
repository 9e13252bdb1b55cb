"""The tower protocol: a Planner that needs no weights, and a Tower that needs no requests.

A model family is one file with one class of each. Graphs, batcher and dispatcher know only these two.

How the hard cases fit, checked on paper before this was written:

- A clip of 384 frame groups (Qwen3-VL): one item, 384 segments, longest = one frame. Units are tokens of 4 rows.
- Two frames folded into one token (ERNIE-4.5-VL video): two units a token. `forward` returns a line per unit or per
  folded pair; `gather_index` picks the lines that are rows of the item.
- Queries that attend to other rows than themselves (MiniCPM's resampler): cu_q differs from cu_k, both are buffers.
- Two paths (DeepSeek-OCR): a path an entry of `paths`, its own capacity; `gather_index` addresses the outputs of all
  paths one behind another, then the tower's constant rows (newlines, separators).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ..types import Capacity, ItemPlan, Layout

if TYPE_CHECKING:
    import torch

PIXELS = "pixels"
"""Name of the one buffer that holds media bytes: uint8, one axis, written by copies from slots and not by `fill`."""


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One static buffer of a path. `pad` is its value wherever `fill` writes nothing: no element is undefined."""

    shape: tuple[int, ...]
    dtype: str  # "uint8", "int32" or "float32"
    pad: float = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class PathSpec:
    """Constants of one path."""

    min_units: int  # smallest automatic budget
    max_units: int  # units of the largest item the model's own processor allows
    rows_per_unit: int
    fixed_units: bool = False  # a unit is a tile, one segment of its own: exact budgets for 1 to 16 of them
    units_per_segment: int = 1  # what segments usually have at least: no capacity has more segments than that allows
    tokens_per_unit: int = 1  # what budgets and caps, which users give in tokens, are divided by
    margin_per_unit: int = 0  # most rows of an item beside those tokens: newlines and separators around a unit


@dataclass(frozen=True, slots=True)
class ImageItem:
    """The size of an image as decoded, before any resize."""

    height: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a caller wants frames chosen; None keeps the model's own value. `fps` and `num_frames` exclude each other."""

    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None


@dataclass(frozen=True, slots=True)
class VideoItem:
    """A video as decoded: number and rate of its frames, and their size before any resize."""

    frames: int
    fps: float
    height: int
    width: int
    sampling: Sampling = Sampling()


class PlanError(ValueError):
    """The model's processor has no answer for this size. The text names the size, the limit and the remedy."""


class Planner(Protocol):
    """Built from the configuration alone, without weights and without CUDA; used by front-ends and by the engine.

    Thread-safe: `plan` and `fill_pixels` are called from many threads at once.
    """

    architecture: str
    layout: Layout
    paths: dict[str, PathSpec]

    @property
    def modalities(self) -> tuple[str, ...]:
        """What `plan` takes: "image", and "video" where the model's own rule for videos can be followed."""
        ...

    def plan(self, item: ImageItem | VideoItem) -> ItemPlan:
        """Pure arithmetic: the same result as the official processor's for every size. Raises PlanError."""
        ...

    def split(self, plan: ItemPlan, holds: Callable[[ItemPlan], bool]) -> list[ItemPlan]:
        """The parts of an item that is too large for one batch: as few as possible, each one that `holds` takes.

        Parts are contiguous runs of whole segments, in order; their pixels and rows follow each other as those of the
        item do. [plan] where it holds, or cannot be cut.
        """
        ...

    def fill_pixels(
        self, media: npt.NDArray[np.uint8] | Iterable[npt.NDArray[np.uint8]], plan: ItemPlan, out: npt.NDArray[np.uint8]
    ) -> None:
        """Resize decoded RGB media as the official processor does, into `out` [pixel_bytes].

        `media` of a still is one array [height, width, 3]; of a video the frames that `plan.frame_indices` names, in
        that order, taken one by one so that they need not exist at once.
        """
        ...

    def plan_patches(self, kind: str, grid: tuple[int, int, int], shape: tuple[int, ...]) -> ItemPlan:
        """The plan of an "image" or a "video" that comes as patches of `shape` from the official processor.

        `grid` counts temporal groups, rows and columns: of patches, or of tiles where images are cut into these.
        It has neither frame indices nor timestamps. Raises PlanError.
        """
        ...

    def fill_patches(self, patches: npt.NDArray[np.generic], plan: ItemPlan, out: npt.NDArray[np.uint8]) -> None:
        """Turn patches back into the pixels they were made of, into `out` [pixel_bytes].

        uint8 patches are pixels as they are, those of float32 or bfloat16 are normalised. Raises PlanError for patches
        that are not of 8-bit pixels.
        """
        ...


class Tower(Protocol):
    """The weights and the computation; used by the engine alone, from its device thread."""

    planner: Planner
    dtype: torch.dtype
    device: torch.device
    constant_rows: torch.Tensor | None
    """Rows [n, width] that `gather_index` may address behind the outputs of all paths; None when there are none."""

    def buffers(self, path: str, capacity: Capacity) -> dict[str, BufferSpec]:
        """The static buffers of a path, a pure function of `capacity`; `pixels` comes last."""
        ...

    def fill(self, path: str, parts: Sequence[ItemPlan], out: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Write the batch's metadata in closed form.

        `out` has an array for every buffer but `pixels`, already set to its pad value. Parts lie one behind another
        in their order: units of part i begin where those of part i-1 end, and so do the bytes of its pixels. Parts
        without units on this path are in the list and take no room. Cumulative lengths repeat their last value up to
        the end, so that nothing outside the segments is ever attended to.
        """
        ...

    def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        """Run a path: tensors on the device in, [lines, width] of `dtype` out.

        Never reads device memory on the host and has no shape that depends on values, so it can be captured; the host
        integers it needs are those of `capacity`. (On a CPU cumulative lengths are host memory, attention may read
        them.) `lines` is a function of `capacity` alone.
        """
        ...

    def gather_index(self, parts: Sequence[ItemPlan], lines: Mapping[str, int]) -> npt.NDArray[np.int32]:
        """Which lines make up the rows of all parts, in order: int32 [sum of tokens].

        Lines are counted over the outputs of the paths in their order, `lines[path]` of each (0 for a skipped path),
        then the constant rows. Window un-permutation, newlines, separators and tile order are this one gather.
        """
        ...
