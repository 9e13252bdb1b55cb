"""From the messages of an Encode call to embeddings.

Shapes: T tokens (rows), H hidden size of one level, W = H x (1 + deepstack levels) the width of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
from zlib_ng import zlib_ng

from opticnerve.chunks import RowChunk
from opticnerve.errors import ChecksumError, ProtocolError, ServerError, from_item
from opticnerve.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration
    from torch import Tensor

DtypeName: TypeAlias = Literal["bfloat16", "float16", "float32"]
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_DTYPES: dict[str, tuple[pb.Dtype.ValueType, np.dtype[Any]]] = {
    "bfloat16": (pb.DTYPE_BFLOAT16, np.dtype(ml_dtypes.bfloat16)),
    "float16": (pb.DTYPE_FLOAT16, np.dtype("<f2")),
    "float32": (pb.DTYPE_FLOAT32, np.dtype("<f4")),
}


def to_wire_dtype(name: str) -> pb.Dtype.ValueType:
    """The wire's number of a dtype. Raises ValueError for a name that is not a DtypeName."""
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is none of {', '.join(_DTYPES)}")
    return _DTYPES[name][0]


class Grid(NamedTuple):
    """Patch grid of an item: temporal groups, rows, columns."""

    t: int
    h: int
    w: int


@dataclass(frozen=True, slots=True)
class Span:
    """A run of consecutive rows with one meaning."""

    kind: str  # "image", "tile", "global" or "frame"
    rows: int
    tile_row: int
    tile_col: int
    timestamp: float  # seconds


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """What an item becomes: all a decoder needs to lay out its prompt."""

    grid: Grid
    merge_size: int  # patches along one side of a token
    processed_height: int  # pixels after the processor's resize
    processed_width: int
    tokens: int  # rows of the embedding = placeholders in the prompt
    spans: tuple[Span, ...]  # in order; they cover all tokens
    frame_indices: tuple[int, ...]
    timestamps: tuple[float, ...]  # seconds, one a temporal group of a video
    second_per_grid_ts: float

    @staticmethod
    def from_wire(plan: pb.ItemPlan) -> ItemPlan:
        return ItemPlan(
            grid=Grid(plan.grid_thw.t, plan.grid_thw.h, plan.grid_thw.w),
            merge_size=plan.merge_size,
            processed_height=plan.processed_height,
            processed_width=plan.processed_width,
            tokens=plan.tokens,
            spans=tuple(
                Span(
                    kind=pb.Span.Kind.Name(span.kind).removeprefix("KIND_").lower(),
                    rows=span.rows,
                    tile_row=span.tile_row,
                    tile_col=span.tile_col,
                    timestamp=span.timestamp,
                )
                for span in plan.spans
            ),
            frame_indices=tuple(plan.frame_indices),
            timestamps=tuple(plan.timestamps),
            second_per_grid_ts=plan.second_per_grid_ts,
        )


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that an item spent in each stage of the server, in order."""

    admit: float
    preprocess: float
    queue: float
    execute: float  # the whole batch on the device
    copy: float
    stream: float

    @property
    def total(self) -> float:
        return self.admit + self.preprocess + self.queue + self.execute + self.copy + self.stream


@dataclass(frozen=True, slots=True)
class Dispatch:
    """How one path of an item was run."""

    path: str
    outcome: Literal["replay", "eager"]
    budget: int  # units of the captured budget, 0 when eager
    units: int  # of this item
    batch_items: int  # items that shared the dispatch
    batch_units: int  # units of all of them
    device: int = 0  # its number on the server


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """The rows of one item. The memory is the caller's, to write to as well; every view here shares it."""

    array: Array = field(repr=False)  # [T, W] of the dtype that was asked for; bfloat16 is that of ml_dtypes
    hidden: int  # H
    plan: ItemPlan
    digest: bytes  # SHA-256 of the canonical media, as `opticnerve.digest` gives it
    crc32: int  # zlib CRC-32 of all rows, checked
    dispatches: tuple[Dispatch, ...]  # one for each path that had work
    timings: Timings
    store_hit: bool  # the rows came from the server's store
    instance_id: str  # the server that answered
    projector_applied: bool  # False: a decoder takes them that applies the model's projector itself

    @property
    def grid(self) -> Grid:
        return self.plan.grid

    @property
    def merge_size(self) -> int:
        return self.plan.merge_size

    @property
    def tokens(self) -> int:
        return self.plan.tokens

    @property
    def main(self) -> Array:
        """The first level of every row: view `[T, H]`."""
        return self.array[:, : self.hidden]

    @property
    def deepstack(self) -> list[Array]:
        """The further levels in ascending order: views `[T, H]`."""
        return [self.array[:, start : start + self.hidden] for start in range(self.hidden, self.width, self.hidden)]

    @property
    def width(self) -> int:
        """Numbers in one row: W."""
        return int(self.array.shape[1])

    @property
    def outcome(self) -> Literal["replay", "eager", "store"]:
        """How: "replay" where a graph ran on every path (a hit), "eager" where any did not, "store" for stored rows."""
        if self.store_hit:
            return "store"
        return "eager" if any(dispatch.outcome == "eager" for dispatch in self.dispatches) else "replay"

    def torch(self) -> Tensor:
        """The rows as a CPU tensor `[T, W]` that shares the memory of `array`. Imports torch."""
        import torch

        if self.array.dtype == ml_dtypes.bfloat16:  # torch does not know numpy's bfloat16
            return torch.from_numpy(self.array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(self.array)


@dataclass(frozen=True, slots=True)
class Held:
    """Rows that a server keeps under a lease, to be fetched by their digest."""

    plan: ItemPlan
    hidden: int
    deepstack_levels: int
    digest: bytes  # SHA-256 of the canonical media: what `Digest` takes
    address: str  # of the very server that holds them
    expires_in: float  # seconds from the answer on
    store_hit: bool  # nothing had to be encoded for this item
    instance_id: str


class Receiver:
    """Puts the messages of one Encode call together, and holds the server to the wire contract.

    `indices` are the caller's positions of the items of the request, in its order. With `held` the answers are Held and
    have no rows, else Embeddings.
    """

    def __init__(self, indices: Sequence[int], dtype: str, *, held: bool = False) -> None:
        self._indices = indices
        self._dtype = dtype
        self._held = held
        self._unanswered = set(range(len(indices)))
        self._rows: _Rows | _NoRows | None = None

    def receive(self, message: pb.EncodeResponse | RowChunk) -> tuple[int, Embedding | Held | ServerError] | None:
        """Takes the next message, as `chunks.unpack` gives it; returns the caller's position and the answer when it
        ends an item.

        Raises ProtocolError when the message is against the contract.
        """
        position = message.item_index
        event = "chunk" if isinstance(message, RowChunk) else message.WhichOneof("event")
        if position not in self._unanswered:
            raise ProtocolError(f"the server answers item {position}, which is answered already or was never sent")
        index = self._indices[position]
        if self._rows is not None and self._rows.index != index:
            raise ProtocolError(f"item {index}: {event} arrives before item {self._rows.index} is finished")
        answer: Embedding | Held | ServerError
        if isinstance(message, RowChunk):
            if self._rows is None:
                raise ProtocolError(f"item {index}: {event} does not belong here")
            self._rows.add(message)
            return None
        if event == "failed":
            answer = from_item(message.failed, index)
        elif event == "started" and self._rows is None:
            begin = _NoRows if self._held else _Rows
            self._rows = begin(index, message.started, self._dtype)
            return None
        elif event == "finished" and self._rows is not None:
            answer = self._rows.finish(message.finished)
        else:
            raise ProtocolError(f"item {index}: {event} does not belong here")
        self._rows = None
        self._unanswered.remove(position)
        return index, answer

    @property
    def is_complete(self) -> bool:
        """Whether every item has its answer."""
        return not self._unanswered

    def close(self) -> None:
        """The call ended well. Raises ProtocolError when items were left without an answer."""
        if self._unanswered:
            missing = ", ".join(str(self._indices[position]) for position in sorted(self._unanswered))
            raise ProtocolError(f"the server ended the call without an answer to items {missing}")


class _Rows:
    """The rows of one item while they arrive, in the buffer that becomes its array."""

    def __init__(self, index: int, started: pb.ItemStarted, dtype: str) -> None:
        layout, (wire_dtype, numpy_dtype) = started.layout, _DTYPES[dtype]
        if layout.dtype != wire_dtype:
            raise ProtocolError(f"item {index}: the rows are {pb.Dtype.Name(layout.dtype)}, {dtype} was asked for")
        if layout.rows != started.plan.tokens or layout.rows == 0 or layout.hidden == 0:
            raise ProtocolError(
                f"item {index}: {layout.rows} rows of hidden size {layout.hidden} for {started.plan.tokens} tokens"
            )
        shape = (layout.rows, layout.hidden * (1 + layout.deepstack_levels))
        self.index = index
        self._started = started
        self._buffer = np.empty(math.prod(shape) * numpy_dtype.itemsize, np.uint8)
        self._array = self._buffer.view(numpy_dtype).reshape(shape)
        self._received = 0
        self._crc32 = 0

    def add(self, chunk: RowChunk) -> None:
        data = chunk.data
        end = self._received + len(data)
        if chunk.offset != self._received or end > self._buffer.size or len(data) % self._array.strides[0]:
            raise ProtocolError(
                f"item {self.index}: {len(data)} bytes at offset {chunk.offset} do not continue {self._received} of "
                f"{self._buffer.size} bytes in rows of {self._array.strides[0]}"
            )
        self._buffer[self._received : end] = np.frombuffer(data, np.uint8)
        self._crc32 = zlib_ng.crc32(data, self._crc32)
        self._received = end

    def finish(self, finished: pb.ItemFinished) -> Embedding:
        if self._received != self._buffer.size:
            raise ProtocolError(f"item {self.index}: finished after {self._received} of {self._buffer.size} bytes")
        if self._crc32 != finished.crc32:
            raise ChecksumError(f"item {self.index}: CRC-32 is {self._crc32:08x}, the server sent {finished.crc32:08x}")
        return Embedding(
            array=self._array,
            hidden=self._started.layout.hidden,
            plan=ItemPlan.from_wire(self._started.plan),
            digest=self._started.digest,
            crc32=finished.crc32,
            dispatches=tuple(_to_dispatch(dispatch) for dispatch in finished.dispatches),
            timings=_to_timings(finished.durations),
            store_hit=finished.store_hit,
            instance_id=self._started.instance_id,
            projector_applied=self._started.layout.projector_applied,
        )


class _NoRows:
    """An item that is held: its rows do not come."""

    def __init__(self, index: int, started: pb.ItemStarted, dtype: str) -> None:
        if not started.HasField("lease_expiry"):
            raise ProtocolError(f"item {index}: a lease was asked for, the server gives none")
        self.index = index
        self._started = started

    def add(self, chunk: RowChunk) -> None:
        raise ProtocolError(f"item {self.index}: rows arrive that were to be held")

    def finish(self, finished: pb.ItemFinished) -> Held:
        started = self._started
        return Held(
            plan=ItemPlan.from_wire(started.plan),
            hidden=started.layout.hidden,
            deepstack_levels=started.layout.deepstack_levels,
            digest=started.digest,
            address=started.address,
            expires_in=started.lease_expiry.ToNanoseconds() / 1e9,
            store_hit=finished.store_hit,
            instance_id=started.instance_id,
        )


def _to_dispatch(dispatch: pb.PathDispatch) -> Dispatch:
    return Dispatch(
        path=dispatch.path,
        outcome="replay" if dispatch.outcome == pb.OUTCOME_REPLAY else "eager",
        budget=dispatch.budget,
        units=dispatch.units,
        batch_items=dispatch.batch_items,
        batch_units=dispatch.batch_units,
        device=dispatch.device,
    )


def _to_timings(durations: pb.StageDurations) -> Timings:
    def seconds(duration: Duration) -> float:
        return duration.ToNanoseconds() / 1e9

    return Timings(
        admit=seconds(durations.admit),
        preprocess=seconds(durations.preprocess),
        queue=seconds(durations.queue),
        execute=seconds(durations.execute),
        copy=seconds(durations.copy),
        stream=seconds(durations.stream),
    )
