"""What passes between the processes: small plain messages, one a datagram.

Front-ends and scheduler talk over one pair of connected sockets each, scheduler and engines likewise, supervisor and
children over others. The sockets are of type SOCK_SEQPACKET: a message is sent and received whole, a dead peer reads as
an empty message. Nothing but these structs crosses; pixels and rows lie in the slots they name (`slots.py`).

The life of an item between a front-end and the scheduler, told by its (call, index):

    Reserve -> Granted -> [front-end writes pixels] -> Submit -> [an engine runs it] -> Rows ... -> Release

Callers of equal items share one slot. The first is granted ENCODE and does as above; the others are granted WAIT and
hear the same Rows, or TakeOver when the first is gone before its Submit: then the next one writes the pixels. Rows that
are stored already are reported behind the grant. An item without media of its own, named by its key, hears Found.

A front-end sends Release exactly once for every item it was granted, at whatever point it is done with it: the decode
failed, the caller is gone, the rows are sent. From then on it touches the slot no more. The scheduler frees the slot,
or moves its rows to the store, once nobody holds it and no device uses it any more.

The life of a part of it between scheduler and engine, told by its number:

    Land -> Run -> [the device computes] -> Computed -> Done, or PartFailed at any time
"""

from __future__ import annotations

import enum
import socket

import msgspec

from .types import Capacity, Dispatched, ItemPlan, Layout, Phase

MAX_MESSAGE_BYTES = 320 << 10
"""Upper bound of one encoded message; a Reserve of a call with the most items stays below it."""

# --- front-end to scheduler


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
    """The pixels of an item are in its slot; the slot is the scheduler's until it answers."""

    call: int
    index: int
    plan: ItemPlan
    dtype: str  # of the rows: "bfloat16", "float16" or "float32"
    parts: list[ItemPlan] = []  # of an item that no graph holds, in order; empty: it is run as it is
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


# --- scheduler to front-end


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


# --- scheduler to engine


class Work(msgspec.Struct, frozen=True, array_like=True):
    """A part of an item; almost always the whole item."""

    number: int  # its name between the two
    plan: ItemPlan
    pixels: int  # where its pixels begin in the arena
    rows: int  # where the rows of its item begin in the arena
    first_row: int  # of these, its own
    dtype: str
    trace: str = ""  # as in Submit


class Land(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Copy the pixels of a part to the device, for the batch that will be the next to run."""

    part: Work


class Run(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run these, of all that have landed since the last Run; what is not named is not wanted any more."""

    numbers: list[int]


# --- engine to scheduler


class Computed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The device could take another batch: what was to run has been computed, or has failed. One for each Run."""


class PartDone(msgspec.Struct, frozen=True, array_like=True):
    """The rows of a part are in its slot."""

    number: int
    dispatches: list[Dispatched]


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Parts that ran together."""

    parts: list[PartDone]
    began_at: float  # time.monotonic() when the device began with them
    execute_s: float
    copy_s: float


class PartFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A part has no rows. `reason` is a row of the table in `errors.py`."""

    number: int
    reason: str
    message: str
    retry_after: float | None = None


class EngineWorks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Whether the device computes: to the scheduler when that changes, to the supervisor every second."""

    works: bool


# --- supervisor to children


class Attach(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the scheduler, with a file descriptor beside it: the socket of a new front-end."""

    frontend: int


class PhaseChange(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From an engine while it starts; to front-ends, which answer callers by it."""

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


# --- engine and scheduler to supervisor to front-ends


class PathState(msgspec.Struct, frozen=True, array_like=True):
    """The captured graphs of one path."""

    name: str
    budgets: list[int]
    graphs: int
    graph_memory_bytes: int
    capture_s: float
    rows_per_unit: int = 1
    tokens_per_unit: int = 1
    capacities: list[Capacity] = []  # that bound a batch, ascending: the captured ones, or those planned without graphs


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


class Device(msgspec.Struct, frozen=True, array_like=True):
    """An engine as the server's callers see it."""

    number: int
    name: str  # "cpu" or the name of the GPU; empty until it is ready for the first time
    phase: Phase
    restarts: int = 0


class Devices(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All engines of the server, whenever one changes."""

    devices: list[Device]


class AttachEngine(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the scheduler, with a file descriptor beside it: the socket of an engine that can take work."""

    device: int
    ready: EngineReady


class EngineEnded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the scheduler: an attached engine's process has ended, and nothing of it can write into a slot any more."""

    device: int


class Occupancy(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Work inside the server, from the scheduler about once a second; also its heartbeat. `device_tokens` are those of
    `tokens` whose items a device works at.
    """

    items: int
    tokens: int
    bytes: int
    device_tokens: int = 0


ToScheduler = Reserve | Submit | Release | EndLeases
OfItem = TakeOver | Found | Rows | Failed
ToFrontend = Granted | Refused | TooLate | LeasesEnded | OfItem
ToChild = Attach | AttachEngine | EngineEnded | PhaseChange | EngineReady | Occupancy | Devices | Stop
OfEngine = Computed | Done | PartFailed | EngineWorks
Message = ToScheduler | ToFrontend | Land | Run | OfEngine | ToChild | FrontendReady | FrontendAlive

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
