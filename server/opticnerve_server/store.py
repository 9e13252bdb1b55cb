"""The embedding store: rows that were encoded before, by content, in the shared memory they were written to.

Nothing is copied: the rows of an item that nobody reads any more stay in its slot, counted against the store's bytes
instead of the queue's, until the room is needed. The least recently used go first; those under a lease, or under a
stream, never.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from . import metrics

NAME_BYTES, VARIANT_BYTES = 16, 16


def name_of(digest: bytes, tenant: str) -> bytes:
    """What a tenant's media are called, however they are encoded: the first 128 bits of every key of theirs."""
    return hashlib.sha256(digest + tenant.encode()).digest()[:NAME_BYTES]


def key_of(digest: bytes, tenant: str, *, fingerprint: str, sampling: bytes, dtype: str) -> bytes:
    """The key of the rows that a tenant's media become, 256 bits.

    `digest` is that of the media (`ItemStarted.digest`), `sampling` how frames are chosen, as the wire has it.
    `fingerprint` covers weights, processor, decode contract, layout and the tower's dtype; `dtype` is that of the rows.
    """
    variant = hashlib.sha256(b"\0".join((fingerprint.encode(), dtype.encode(), sampling)))
    return name_of(digest, tenant) + variant.digest()[:VARIANT_BYTES]


@dataclass(slots=True, eq=False)
class Lease:
    """A promise to keep rows until `expires`, time.monotonic(), or until `reads` more were made; None: any number."""

    expires: float
    reads: int | None


class Kept(Protocol):
    """What the store knows of an item. `store_bytes` is what its rows take."""

    key: bytes
    leases: list[Lease]
    is_stored: bool

    @property
    def store_bytes(self) -> int: ...

    @property
    def is_read(self) -> bool:
        """Whether some caller holds it."""
        ...


Item = TypeVar("Item", bound=Kept)


@dataclass(slots=True)
class Store(Generic[Item]):
    """Which items are kept, and for how long. Not thread-safe: the ledger's lock guards it.

    `leased_bytes` counts what is promised, rows that are still to be encoded included, and never exceeds `max_bytes`.
    """

    max_bytes: int
    now: Callable[[], float] = time.monotonic
    used_bytes: int = 0
    leased_bytes: int = 0
    items: int = 0
    _idle: OrderedDict[bytes, Item] = field(default_factory=OrderedDict)  # may go, the least recently used first
    _expiries: list[tuple[float, int, Item, Lease]] = field(default_factory=list)  # a heap
    _ended: int = 0  # leases that have ended since the heap was last cleared of them, at most
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def can_lease(self, item: Item | None, nbytes: int) -> bool:
        """Whether one more lease can be taken: on `item`, or on a new one whose rows take `nbytes`."""
        return (item is not None and bool(item.leases)) or self.leased_bytes + nbytes <= self.max_bytes

    def lease(self, item: Item, seconds: float, reads: int) -> Lease:
        """Take a lease, of `reads` reads, 0 for any number."""
        if not item.leases:
            self.leased_bytes += item.store_bytes
        lease = Lease(self.now() + seconds, reads or None)
        item.leases.append(lease)
        heapq.heappush(self._expiries, (lease.expires, next(self._numbers), item, lease))
        self.touch(item)
        return lease

    def end(self, item: Item, lease: Lease) -> None:
        """End a lease, once."""
        item.leases.remove(lease)
        if not item.leases:
            self.leased_bytes -= item.store_bytes
        self.touch(item)
        self._ended += 1
        if self._ended > 64 + len(self._expiries) // 2:  # or early ends would pile up until their time
            self._expiries = [entry for entry in self._expiries if entry[3] in entry[2].leases]
            heapq.heapify(self._expiries)
            self._ended = 0

    def read(self, item: Item) -> None:
        """All rows were read: one read less for the lease that ends first among those that count them."""
        lease = min((lease for lease in item.leases if lease.reads), key=lambda lease: lease.expires, default=None)
        if lease is not None and lease.reads:
            lease.reads -= 1
            if not lease.reads:
                self.end(item, lease)

    def expired(self) -> Iterator[Item]:
        """End the leases whose time is over; yields their items."""
        while self._expiries and self._expiries[0][0] <= self.now():
            *_, item, lease = heapq.heappop(self._expiries)
            if lease in item.leases:
                self.end(item, lease)
                yield item

    def keep(self, item: Item) -> Iterator[Item]:
        """Take an item in; yields those that had to go, the item itself if there is no room for it."""
        while self.used_bytes + item.store_bytes > self.max_bytes:
            gone = self.evict()
            if gone is not None:
                yield gone
            elif item.leases:
                break  # promised: streams of others hold the room for a moment
            else:
                yield item
                return
        item.is_stored = True
        self.used_bytes += item.store_bytes
        self.items += 1
        self.touch(item)

    def touch(self, item: Item) -> None:
        """It was used: as if new, if it may go at all."""
        if not item.is_stored:
            return
        self._idle.pop(item.key, None)
        if not item.leases and not item.is_read:
            self._idle[item.key] = item

    def evict(self) -> Item | None:
        """Let go of the least recently used item; None if every one is promised or read."""
        if not self._idle:
            return None
        _, item = self._idle.popitem(last=False)
        item.is_stored = False
        self.used_bytes -= item.store_bytes
        self.items -= 1
        metrics.STORE_EVICTIONS.inc()
        return item
