"""The vocabulary of the server: what an item becomes, what a batch asks for, what a set of buffers holds.

Plain values without torch or gRPC, so that every process imports them. The msgspec structs also travel between
processes (`messages.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec


class Phase(enum.StrEnum):
    """The life of a server, in order; FAILED can follow any, READY and UNHEALTHY each other."""

    LOADING = "loading"
    CAPTURING = "capturing"
    READY = "ready"
    UNHEALTHY = "unhealthy"  # the device does not compute, and is tried again every second
    DRAINING = "draining"
    FAILED = "failed"


class Outcome(enum.StrEnum):
    """How one path of one batch ran: HIT is a replay of a captured graph, MISS one eager forward."""

    HIT = "hit"
    MISS = "miss"


class Reason(enum.StrEnum):
    """Why a dispatch was a hit or a miss."""

    FITS = "fits"
    TOO_MANY_TOKENS = "too_many_tokens"
    TOO_MANY_ITEMS = "too_many_items"
    TOO_MANY_SEGMENTS = "too_many_segments"
    SEGMENT_TOO_LONG = "segment_too_long"
    NOT_CAPTURED = "not_captured"
    DISABLED = "disabled"


class Launch(enum.Enum):
    """By what a launch of attention grows, however little its segments hold: what a tight capacity saves."""

    ROWS = enum.auto()
    SEGMENTS = enum.auto()  # a tile for each, however long one may be
    TILES = enum.auto()  # segments x longest


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one set of static buffers holds: of a captured graph, or of one eager forward.

    `units` is the budget; `longest` is the rows of the longest attention segment. None of the four is derived from
    another by division: a launch freezes segments and longest, so they bound what may run, whatever the units.
    """

    units: int
    items: int
    segments: int
    longest: int


class PathPlan(msgspec.Struct, frozen=True, array_like=True):
    """What one item asks of one path of the tower."""

    units: int
    segments: int
    longest: int  # rows of its longest segment
    pixel_bytes: int  # bytes of its part of the slot's pixels


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A run of consecutive rows of an embedding with one meaning."""

    kind: str  # "image", "tile", "global" or "frame"
    rows: int
    tile_row: int = 0
    tile_col: int = 0
    timestamp: float = 0.0


class ItemPlan(msgspec.Struct, frozen=True, array_like=True):
    """What arithmetic alone says of an item. `paths` has every path of the tower in order, also those of 0 units."""

    kind: str  # "image" or "video"
    height: int  # pixels after the processor's resize
    width: int
    grid: tuple[int, int, int]  # temporal groups, patch rows, patch columns
    merge: int
    tokens: int  # rows of the embedding
    paths: dict[str, PathPlan]
    spans: tuple[Span, ...]
    frame_indices: tuple[int, ...] = ()
    timestamps: tuple[float, ...] = ()
    second_per_grid_ts: float = 0.0
    grids: tuple[tuple[int, int], ...] = ()  # patch rows and columns of every segment, where `grid` does not say them

    @property
    def pixel_bytes(self) -> int:
        """Bytes of the item's pixels: those of its paths, one path behind another."""
        return sum(path.pixel_bytes for path in self.paths.values())


@dataclass(frozen=True, slots=True)
class Load:
    """What the parts of one batch ask of one path together. `units == 0` means that the path is skipped."""

    units: int
    items: int
    segments: int
    longest: int

    @staticmethod
    def of(plans: Iterable[PathPlan]) -> Load:
        used = [plan for plan in plans if plan.units]
        return Load(
            units=sum(plan.units for plan in used),
            items=len(used),
            segments=sum(plan.segments for plan in used),
            longest=max((plan.longest for plan in used), default=0),
        )

    def plus(self, plan: PathPlan) -> Load:
        """With one more part."""
        if not plan.units:
            return self
        return Load(
            self.units + plan.units, self.items + 1, self.segments + plan.segments, max(self.longest, plan.longest)
        )


class Dispatched(msgspec.Struct, frozen=True, array_like=True):
    """How one path ran in the batch of an item, or of a part of one."""

    path: str
    outcome: Outcome
    budget: int  # units of the captured budget, 0 when eager
    units: int  # of the item or part
    batch_items: int
    batch_units: int
    device: int = 0


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """What one embedding row holds: `levels` times `hidden` numbers, the main level first."""

    hidden: int
    deepstack_levels: int
    projector_applied: bool = True

    @property
    def width(self) -> int:
        return self.hidden * (1 + self.deepstack_levels)


ROW_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of one number of a row, by the dtypes that the wire knows."""
