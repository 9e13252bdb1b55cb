"""What passes between the processes: small plain messages, one a datagram.

Front-ends and engine talk over one pair of connected sockets each, supervisor and children over another. The sockets
are of type SOCK_SEQPACKET: a message is sent and received whole, and a dead peer reads as an empty message. Nothing but
these structs crosses; pixels and rows lie in the slots they name (`slots.py`).

The life of an item between a front-end and the engine, told by its (call, index):

    Reserve -> Granted -> [front-end writes pixels] -> Submit -> [engine runs it] -> Rows ... -> Release

Callers of equal items share one slot. The first is granted ENCODE and does as above; the others are granted WAIT and
hear the same Rows, or TakeOver when the first is gone before its Submit: then the next one writes the pixels. Rows that
are stored already are reported behind the grant. An item without media of its own, named by its key, hears Found.

A front-end sends Release exactly once for every item it was granted, at whatever point it is done with it: the decode
failed, the caller is gone, the rows are sent. From then on it touches the slot no more. The engine frees the slot, or
moves its rows to the store, once nobody holds it and the device no longer uses it.
"""

from __future__ import annotations

import enum
import socket

import msgspec

from .types import Dispatched, ItemPlan, Layout, Phase

MAX_MESSAGE_BYTES = 320 << 10
"""Upper bound of one encoded message; a Reserve of a call with the most items stays below it."""

# --- front-end to engine


class ItemRequest(msgspec.Struct, frozen=True, array_like=True):
    """What one item needs to be admitted."""

    tokens: int
    encoded_bytes: int  # bytes of the media in the front-end's memory
    pixel_bytes: int  # room for pixels in the slot
    row_bytes: int  # room for rows in the slot
    key: bytes = b""  # of its rows in the store (`store.key_of`); empty: they are neither shared nor kept
    fetch: bool = False  # it has no media, only the key: what is neither stored nor on its way is not granted


class Hold(msgspec.Struct, frozen=True, array_like=True):
    """A lease to be taken on rows."""

    seconds: float
    reads: int  # after so many the lease ends; 0: only by time


class Reserve(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for the slots of all items of a call: all or none."""

    call: int
    indices: list[int]
    items: list[ItemRequest]
    deadline: float = float("inf")  # time.monotonic()
    tenant: str = ""
    hold: Hold | None = None


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The pixels of an item are in its slot; the slot is the engine's until it answers."""

    call: int
    index: int
    plan: ItemPlan
    dtype: str  # of the rows: "bfloat16", "float16" or "float32"
    trace: str = ""  # the span of its call (`tracing.current`)


class Release(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The front-end is done with an item, at whatever stage."""

    call: int
    index: int
    served: bool = False  # its caller has all rows


class EndLeases(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End one lease of each item whose key begins with one of `names`."""

    call: int
    names: list[bytes]


# --- engine to front-end


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """Two byte ranges of the arena: pixels from `pixels` on, as many as the item has; rows from `rows` to `end`."""

    pixels: int
    rows: int
    end: int


class GrantKind(enum.IntEnum):
    """What a front-end is to do with an item of its call."""

    ENCODE = 0  # write its pixels and submit it
    WAIT = 1  # its rows are there, or on their way
    MISSING = 2  # nothing: no rows of this key are there or on their way
    FULL = 3  # nothing: the store cannot hold one more lease


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """The answer to one item of a Reserve. MISSING and FULL hold nothing and are not released."""

    kind: GrantKind
    slot: Slot


class Granted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The grants of a call, in the order of its Reserve."""

    call: int
    grants: list[Grant]


class TakeOver(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The caller who was to encode an item is gone: write its pixels and submit it."""

    call: int
    index: int


class Found(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What an item is that was named by its key; before its first Rows."""

    call: int
    index: int
    plan: ItemPlan


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The call does not fit: now (`retry_after` seconds), or ever (`retry_after` is None)."""

    call: int
    resource: str  # "items", "tokens" or "bytes"
    requested: int
    limit: int
    retry_after: float | None


class TooLate(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The call would not be done by its deadline."""

    call: int
    needed_s: float
    left_s: float


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


class LeasesEnded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to EndLeases."""

    call: int
    count: int


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
    """Work inside the server, from the engine about once a second; also its heartbeat. `device_tokens` are those of
    `tokens` whose items the device works at.
    """

    items: int
    tokens: int
    bytes: int
    works: bool = True  # whether the device computes
    device_tokens: int = 0


ToEngine = Reserve | Submit | Release | EndLeases
OfItem = TakeOver | Found | Rows | Failed
ToFrontend = Granted | Refused | TooLate | LeasesEnded | OfItem
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
