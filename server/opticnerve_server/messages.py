"""What passes between the processes: small plain messages, one a datagram.

Front-ends and engine talk over one pair of connected sockets each, supervisor and children over another. The sockets
are of type SOCK_SEQPACKET: a message is sent and received whole, and a dead peer reads as an empty message. Nothing but
these structs crosses; pixels and rows lie in the slots they name (`slots.py`).

The life of an item between a front-end and the engine, told by its (call, index):

    Reserve -> Granted -> [front-end writes pixels] -> Submit -> [engine runs it] -> Rows ... -> Release

A front-end sends Release exactly once for every item it was granted, at whatever point it is done with it: the decode
failed, the caller is gone, the rows are sent. From then on it touches the slot no more. The engine frees the slot at
once, or as soon as the device no longer uses it.
"""

from __future__ import annotations

import socket

import msgspec

from .types import Dispatched, ItemPlan, Layout, Phase

MAX_MESSAGE_BYTES = 160 << 10
"""Upper bound of one encoded message; a Reserve of a call with the most items stays below it."""

# --- front-end to engine


class ItemRequest(msgspec.Struct, frozen=True, array_like=True):
    """What one item needs to be admitted."""

    tokens: int
    encoded_bytes: int  # bytes of the media in the front-end's memory
    pixel_bytes: int  # room for pixels in the slot
    row_bytes: int  # room for rows in the slot


class Reserve(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for the slots of all items of a call: all or none."""

    call: int
    indices: list[int]
    items: list[ItemRequest]


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The pixels of an item are in its slot; the slot is the engine's until it answers."""

    call: int
    index: int
    plan: ItemPlan
    dtype: str  # of the rows: "bfloat16", "float16" or "float32"
    deadline: float  # time.monotonic(); infinity when the caller set none


class Release(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The front-end is done with an item, at whatever stage."""

    call: int
    index: int


# --- engine to front-end


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """A byte range of the arena: pixels first, rows behind them from `rows`."""

    start: int
    rows: int
    end: int


class Granted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The slots of a call, in the order of its Reserve."""

    call: int
    slots: list[Slot]


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The call does not fit: now (`retry_after` seconds), or ever (`retry_after` is None)."""

    call: int
    resource: str  # "items", "tokens" or "bytes"
    requested: int
    limit: int
    retry_after: float | None


class Rows(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Rows of an item are in its slot: all of them, or those of one of its parts, which follow in order."""

    call: int
    index: int
    start: int  # first row
    count: int
    dispatches: list[Dispatched]
    queue_s: float
    execute_s: float
    copy_s: float


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An item has no rows. `reason` is a row of the table in `errors.py`."""

    call: int
    index: int
    reason: str
    message: str
    retry_after: float | None = None


# --- supervisor to children


class Attach(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the engine, with a file descriptor beside it: the socket of a new front-end."""

    frontend: int


class PhaseChange(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From the engine while it starts; to front-ends, which answer callers by it."""

    phase: Phase
    detail: str = ""


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Finish what is admitted within `grace` seconds, then exit."""

    grace: float


# --- front-end to supervisor


class FrontendReady(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """It has the model's planner: from its side, calls can come."""


class FrontendAlive(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Its loop runs and its worker threads live: about once a second from FrontendReady on."""


# --- engine to supervisor to front-ends


class PathState(msgspec.Struct, frozen=True, array_like=True):
    """The captured graphs of one path."""

    name: str
    budgets: list[int]
    graphs: int
    graph_memory_bytes: int
    capture_s: float


class EngineReady(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What only the loaded model knows."""

    fingerprint: str
    dtype: str
    device: str
    attention_backend: str
    paths: list[PathState]
    reasons: dict[str, str]
    model: str = ""  # its name
    architecture: str = ""
    layout: Layout = Layout(0, 0)
    modalities: tuple[str, ...] = ()  # of the model


class Occupancy(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Work inside the server, from the engine about once a second; also its heartbeat."""

    items: int
    tokens: int
    bytes: int
    works: bool = True  # whether the device computes


ToEngine = Reserve | Submit | Release
ToFrontend = Granted | Refused | Rows | Failed
ToChild = Attach | PhaseChange | EngineReady | Occupancy | Stop
Message = ToEngine | ToFrontend | ToChild | FrontendReady | FrontendAlive

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair of message sockets, with the largest buffers that the kernel grants."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    return pair


def encode(message: Message) -> bytes:
    """One message as the bytes of one datagram."""
    return _encode(message)


def decode(data: bytes) -> Message:
    """The message of one datagram. An empty one means that the peer is gone: test for it first."""
    return _decode(data)
