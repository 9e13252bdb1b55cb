"""An item inside the scheduler, and the claims of the callers who hold it: one, or several where equal items met."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .messages import Found, ItemRequest, Rows, Slot, ToFrontend
from .slots import SlotAllocator
from .store import Lease
from .types import Dispatched, ItemPlan

Notice = tuple[int, ToFrontend]
"""What a front-end, by its index, is to be told."""

NOWHERE = Slot(0, 0, 0)


@dataclass(slots=True, eq=False)
class Claim:
    """A caller's hold on an item."""

    frontend: int
    call: int
    index: int
    tenant: str
    item: Item
    encoded_bytes: int
    deadline: float  # time.monotonic()
    fetch: bool  # it has no media of its own
    lease: Lease | None = None

    @property
    def id(self) -> tuple[int, int, int]:
        return self.frontend, self.call, self.index

    def found(self) -> Iterator[Notice]:
        """What the item is, once that is known, for who sent a digest alone."""
        if self.fetch and self.item.plan is not None:
            yield self.frontend, Found(self.call, self.index, self.item.plan)

    def known(self) -> Iterator[Notice]:
        """What a claim on an item that is on its way, or there, is told at once."""
        yield from self.found()
        if self.item.is_stored:
            yield Progress(0, self.item.tokens, []).told_to(self)
        else:
            for progress in self.item.progress:
                yield progress.told_to(self)


@dataclass(frozen=True, slots=True)
class Progress:
    """Rows of an item that are in its slot, and how they came there."""

    start: int
    count: int
    dispatches: list[Dispatched]
    queue_s: float = 0.0
    execute_s: float = 0.0
    copy_s: float = 0.0

    def told_to(self, claim: Claim) -> Notice:
        told = (self.start, self.count, self.dispatches, self.queue_s, self.execute_s, self.copy_s)
        return claim.frontend, Rows(claim.call, claim.index, *told)


@dataclass(slots=True, eq=False)
class Item:
    """One item inside the server, whoever waits for it. The ledger's lock guards what changes.

    Its slot is the first claim's front-end's until it is submitted, then the device's for reading pixels, and piece by
    piece, as rows are reported, that of every claim for reading.
    """

    key: bytes
    tenant: str
    order: tuple[float, int]  # of its call among all calls; the lowest goes first
    index: int
    tokens: int
    pixel_bytes: int  # what they take of the arena, as are the next
    row_bytes: int
    slot: Slot = NOWHERE
    plan: ItemPlan | None = None
    dtype: str = ""
    trace: str = ""  # the span of the call that submitted it
    granted_at: float = 0.0  # time.monotonic(), to who writes its pixels; as is the next
    submitted_at: float = 0.0
    claims: list[Claim] = field(default_factory=list)
    writer: Claim | None = None  # who writes its pixels
    progress: list[Progress] = field(default_factory=list)  # in the order of the rows
    early: dict[int, Progress] = field(default_factory=dict)  # by first row; parts before them are on other devices
    on_device: int = 0  # parts that copies or kernels may be using
    failed: bool = False  # the claims have been told
    is_done: bool = False  # all rows are in the slot, the pixels are freed
    is_stored: bool = False
    leases: list[Lease] = field(default_factory=list)

    @property
    def placed(self) -> ItemPlan:
        """The plan of a submitted item."""
        assert self.plan is not None
        return self.plan

    @property
    def tokens_done(self) -> int:
        return sum(done.count for done in self.progress)

    @property
    def unwanted(self) -> bool:
        """Nobody waits for it any more."""
        return not self.claims and not self.leases

    @property
    def is_read(self) -> bool:
        return bool(self.claims)

    @property
    def store_bytes(self) -> int:
        return self.row_bytes


def new_item(request: ItemRequest, tenant: str, order: tuple[float, int], index: int) -> Item:
    """An item without a slot yet, whose `end` says how many bytes of rows it has."""
    sizes = SlotAllocator.rounded(request.pixel_bytes), SlotAllocator.rounded(request.row_bytes)
    return Item(request.key, tenant, order, index, request.tokens, *sizes, slot=Slot(0, 0, request.row_bytes))
