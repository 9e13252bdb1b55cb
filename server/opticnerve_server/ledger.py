"""The scheduler's side of admission: every item inside the server, what it holds, and who may touch its slot.

Being granted slots is admission, so the bounds on items, tokens and bytes hold by construction. An item is held by the
claims of the callers who wait for it or read it: one, or several where equal items came close together. When the last
is gone its slot is freed, once the device no longer uses it, or its rows go to the store.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence

from . import metrics
from .claims import NOWHERE, Claim, Item, Notice, Progress, new_item
from .messages import (
    Failed,
    Grant,
    Granted,
    GrantKind,
    ItemRequest,
    LeasesEnded,
    Occupancy,
    Refused,
    Reserve,
    Slot,
    Submit,
    TakeOver,
    TooLate,
)
from .pace import Pace
from .shares import Shares
from .slots import SlotAllocator
from .store import Store

ORPHANED = "the caller that was to encode it is gone: send the media themselves"


class Ledger:
    """Grants and frees slots. Thread-safe.

    What is returned as notices must reach the front-ends in the order of the calls that returned them.
    """

    def __init__(self, *, max_items: int, max_tokens: int, max_bytes: int, store_bytes: int = 0) -> None:
        """The arena has `max_bytes` + `store_bytes` bytes; encoded media, which lie elsewhere, count as the first."""
        self._shares = Shares({"items": max_items, "tokens": max_tokens, "bytes": max_bytes})
        self._slots = SlotAllocator(max_bytes + store_bytes)
        self.store: Store[Item] = Store(store_bytes)
        self._claims: dict[tuple[int, int, int], Claim] = {}
        self._named: dict[bytes, Item] = {}  # by key: in flight, or stored
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self.on_device = 0
        """Parts that copies or kernels may be using."""
        self._device_tokens = 0
        self._pace = Pace()

    def reserve(self, frontend: int, message: Reserve) -> list[Notice]:
        """Slots for all items of a call, or none and why; then what is known already of those that others encode."""
        with self._lock:
            self._expire()
            grants: list[GrantKind] = []
            found: list[Item | None] = []
            claims: list[Claim] = []
            fresh: dict[bytes, Item] = {}  # those without a key under their own number
            number = next(self._numbers)
            for index, request in zip(message.indices, message.items, strict=True):
                item = self._named.get(request.key) or fresh.get(request.key) if request.key else None
                kind = self._kind_of(item, request, message)
                grants.append(kind)
                found.append(item)
                if kind in (GrantKind.MISSING, GrantKind.FULL):
                    continue
                if item is None:
                    item = new_item(request, message.tenant, (self._shares.start(message.tenant), number), index)
                    fresh[request.key or index.to_bytes(4, "little")] = item
                claims.append(self._claim(frontend, message, index, request, item))
            refused = (
                self._refusal(message, claims, list(fresh.values()))
                or self._too_late(message, number, list(fresh.values()))
                or self._allocate(message.call, list(fresh.values()))
            )
            if refused is not None:
                for claim in claims:
                    self._unclaim(claim)
                return [(frontend, refused)]
            self._admit(message.tenant, claims, list(fresh.values()))
            for request, kind, item in zip(message.items, grants, found, strict=True):
                if request.key:
                    metrics.STORE_LOOKUPS.labels(_lookup(kind, item)).inc()
            slots = iter([claim.item.slot for claim in claims])
            granted = [Grant(k, next(slots) if k in (GrantKind.ENCODE, GrantKind.WAIT) else NOWHERE) for k in grants]
            known = [notice for claim in claims for notice in claim.known()]
            return [(frontend, Granted(message.call, granted)), *known]

    def submit(self, frontend: int, message: Submit) -> tuple[Item | None, list[Notice]]:
        """The item whose pixels are ready; None if they are not this claim's to write, or were written before."""
        with self._lock:
            claim = self._claims.get((frontend, message.call, message.index))
            if claim is None or claim.item.writer is not claim or claim.item.plan is not None:
                return None, []
            item = claim.item
            item.plan, item.dtype, item.submitted_at = message.plan, message.dtype, time.monotonic()
            item.trace = message.trace
            self._pace.preparing.add(item.submitted_at - item.granted_at)
            return item, [notice for other in item.claims for notice in other.found()]

    def release(self, frontend: int, call: int, index: int, served: bool = False) -> list[Notice]:
        """A caller is done with an item."""
        with self._lock:
            claim = self._claims.get((frontend, call, index))
            return [] if claim is None else self._drop(claim, served)

    def disconnect(self, frontend: int) -> tuple[int, list[Notice]]:
        """Release all items of a front-end that is gone; how many there were."""
        with self._lock:
            gone = [claim for claim in self._claims.values() if claim.frontend == frontend]
            return len(gone), [notice for claim in gone for notice in self._drop(claim)]

    def end_leases(self, frontend: int, call: int, names: Sequence[bytes]) -> list[Notice]:
        """End of every item whose key begins with one of `names` the lease that ends first."""
        with self._lock:
            held = [item for item in self._named.values() if item.leases and item.key.startswith(tuple(names))]
            for item in held:
                self.store.end(item, min(item.leases, key=lambda lease: lease.expires))
                self._settle(item)
            return [(frontend, LeasesEnded(call, len(held)))]

    def to_device(self, item: Item, *, early: bool = False) -> bool:
        """A part of the item joins a batch, `early` if others wait before it: calls that come now keep their place
        among those. False if nobody waits for it any more: it must not.
        """
        with self._lock:
            if item.unwanted or item.failed:
                return False
            if not early:
                self._shares.reach(item.order[0])
            item.on_device += 1
            self.on_device += 1
            if item.on_device == 1:
                self._device_tokens += item.tokens
            return True

    def is_wanted(self, item: Item, now: float) -> bool:
        """Whether somebody still waits for the item at time.monotonic() `now`; its lease counts as one who waits."""
        with self._lock:
            ends = [claim.deadline for claim in item.claims] + [lease.expires for lease in item.leases]
            return max(ends, default=now) > now

    def from_device(self, item: Item, progress: Progress) -> list[Notice]:
        """The rows of a part are in the slot; they are told of once those before them are."""
        with self._lock:
            self._leave_device(item, progress.count)
            if item.failed or item.unwanted:
                self._settle(item)
                return []
            item.early[progress.start] = progress
            told = []
            while (following := item.early.pop(item.tokens_done, None)) is not None:
                item.progress.append(following)
                told.append(following)
            if item.tokens_done == item.tokens:
                item.is_done = True
                self._free_pixels(item)
            notices = [progress.told_to(claim) for progress in told for claim in item.claims]
            self._settle(item)
            return notices

    def unrun(self, item: Item) -> None:
        """A part comes back as it went: it will join another batch."""
        with self._lock:
            self._leave_device(item, 0)
            self._settle(item)

    def fail(self, item: Item, reason: str, message: str, retry_after: float | None = None) -> list[Notice]:
        """A part comes back without rows: nothing else of its item runs, and everyone who waits is told, once."""
        with self._lock:
            self._leave_device(item, 0)
            notices = [] if item.failed else self._fail(item, item.claims, reason, message, retry_after)
            self._settle(item)
            return notices

    def batches_hold(self, tokens: int, items: int) -> None:
        """What a full batch is made of."""
        with self._lock:
            self._pace.batch_tokens, self._pace.batch_items = tokens, items

    def computed(self, seconds: float) -> None:
        """The device has worked at a batch for so long."""
        with self._lock:
            self._pace.computing.add(seconds)

    def occupancy(self) -> Occupancy:
        """What is inside now, the store left out."""
        with self._lock:
            self._expire()
            used = self._shares.used
            return Occupancy(used["items"], used["tokens"], used["bytes"], device_tokens=self._device_tokens)

    # --- letting in

    def _kind_of(self, item: Item | None, request: ItemRequest, message: Reserve) -> GrantKind:
        if item is None and request.fetch:
            return GrantKind.MISSING
        nbytes = SlotAllocator.rounded(request.row_bytes)
        if message.hold is not None and not self.store.can_lease(item, item.row_bytes if item else nbytes):
            return GrantKind.FULL
        return GrantKind.ENCODE if item is None else GrantKind.WAIT

    def _claim(self, frontend: int, message: Reserve, index: int, request: ItemRequest, item: Item) -> Claim:
        holder = frontend, message.call, index, message.tenant
        claim = Claim(*holder, item, request.encoded_bytes, message.deadline, request.fetch)
        item.claims.append(claim)
        if message.hold is not None:
            claim.lease = self.store.lease(item, message.hold.seconds, message.hold.reads)
        self.store.touch(item)
        return claim

    def _unclaim(self, claim: Claim) -> None:
        """Undo `_claim`."""
        claim.item.claims.remove(claim)
        if claim.lease is not None:
            self.store.end(claim.item, claim.lease)
        self.store.touch(claim.item)

    def _refusal(self, message: Reserve, claims: list[Claim], fresh: list[Item]) -> Refused | None:
        wanted = {
            "items": len(claims),
            "tokens": sum(item.tokens for item in fresh),
            "bytes": sum(item.pixel_bytes + item.row_bytes for item in fresh)
            + sum(claim.encoded_bytes for claim in claims),
        }
        resource = self._shares.lacking(message.tenant, wanted)
        if resource is None:
            return None
        amount, limit = wanted[resource], self._shares.limits[resource]
        return Refused(message.call, resource, amount, limit, None if amount > limit else self._time_to_half())

    def _too_late(self, message: Reserve, number: int, fresh: list[Item]) -> TooLate | None:
        """Why not even the new items of a call will be there by its deadline. Rows that others wait for, or hold, may
        be there any moment.
        """
        used, left = self._shares.used, message.deadline - time.monotonic()
        own = sum(item.tokens for item in fresh)
        most = self._pace.time_to_answer(used["tokens"] + own, used["items"] + len(fresh), busy=False)
        if not fresh or most is None or most <= left:
            return None  # as a rule; to look at all items may take a millisecond
        order = self._shares.start(message.tenant), number
        inside = {claim.item for claim in self._claims.values()}
        ahead = [item for item in inside if item.order < order and not item.is_done and not item.failed]
        tokens = own + sum(item.tokens - item.tokens_done for item in ahead)
        needed = self._pace.time_to_answer(tokens, len(ahead) + len(fresh), busy=self.on_device > 0)
        return None if needed is None or needed <= left else TooLate(message.call, needed, left)

    def _allocate(self, call: int, items: list[Item]) -> Refused | None:
        """Slots for new items, all or none: those that are stored make room where it is in pieces."""
        taken: list[tuple[int, int]] = []
        for item in items:
            starts = []
            for nbytes in (item.pixel_bytes, item.row_bytes):
                start = self._allocate_range(nbytes)
                if start is None:
                    for given in taken:
                        self._slots.release(*given)
                    wanted = sum(item.pixel_bytes + item.row_bytes for item in items)
                    return Refused(call, "bytes", wanted, self._shares.limits["bytes"], self._time_to_half())
                starts.append(start)
                taken.append((start, nbytes))
            item.slot = Slot(starts[0], starts[1], starts[1] + item.slot.end)
        return None

    def _allocate_range(self, nbytes: int) -> int | None:
        while (start := self._slots.allocate(nbytes)) is None:
            evicted = self.store.evict()
            if evicted is None:
                return None
            self._forget(evicted)
        return start

    def _admit(self, tenant: str, claims: list[Claim], fresh: list[Item]) -> None:
        """Count in what was granted, and give it its turn."""
        self._shares.queue(tenant, sum(item.tokens for item in fresh))
        for item in fresh:
            item.writer, item.granted_at = item.claims[0], time.monotonic()
            if item.key:
                self._named[item.key] = item
            self._shares.charge(tenant, "tokens", item.tokens)
            self._shares.charge(tenant, "bytes", item.pixel_bytes + item.row_bytes)
        for claim in claims:
            self._claims[claim.id] = claim
            self._shares.charge(tenant, "items", 1)
            self._shares.charge(tenant, "bytes", claim.encoded_bytes)

    # --- letting go

    def _drop(self, claim: Claim, served: bool = False) -> list[Notice]:
        item = claim.item
        del self._claims[claim.id]
        item.claims.remove(claim)
        self._shares.charge(claim.tenant, "items", -1)
        self._shares.charge(claim.tenant, "bytes", -claim.encoded_bytes)
        if served and claim.fetch:
            self.store.read(item)
        self.store.touch(item)
        notices = self._pass_on(item) if item.writer is claim and item.plan is None and not item.failed else []
        self._settle(item)
        return notices

    def _pass_on(self, item: Item) -> list[Notice]:
        """Who was to write the pixels is gone: the next who has the media does, else nobody can."""
        item.writer = next((claim for claim in item.claims if not claim.fetch), None)
        if item.writer is not None:
            item.granted_at = time.monotonic()
            return [(item.writer.frontend, TakeOver(item.writer.call, item.writer.index))]
        return self._fail(item, item.claims, "NOT_CACHED", ORPHANED)

    def _fail(
        self, item: Item, told: list[Claim], reason: str, message: str, retry_after: float | None = None
    ) -> list[Notice]:
        item.failed = True
        if self._named.get(item.key) is item:
            del self._named[item.key]  # whoever comes now tries anew
        for lease in list(item.leases):
            self.store.end(item, lease)
        return [(claim.frontend, Failed(claim.call, claim.index, reason, message, retry_after)) for claim in told]

    def _leave_device(self, item: Item, rows: int) -> None:
        self._pace.drained(rows)
        item.on_device -= 1
        self.on_device -= 1
        if not item.on_device:
            self._device_tokens -= item.tokens

    def _settle(self, item: Item) -> None:
        """Once nobody holds an item and the device is done with it: keep its rows, or free everything."""
        if item.claims or item.on_device or item.is_stored or item.slot is NOWHERE:
            return
        if item.is_done and item.key and not item.failed:
            self._leave_queue(item)
            for gone in self.store.keep(item):
                self._forget(gone)
        elif not item.leases:
            self._free_pixels(item)
            self._leave_queue(item)
            self._forget(item)

    def _free_pixels(self, item: Item) -> None:
        if item.pixel_bytes:
            self._slots.release(item.slot.pixels, item.pixel_bytes)
            self._shares.charge(item.tenant, "bytes", -item.pixel_bytes)
            item.pixel_bytes = 0

    def _leave_queue(self, item: Item) -> None:
        self._shares.charge(item.tenant, "tokens", -item.tokens)
        self._shares.charge(item.tenant, "bytes", -item.row_bytes)

    def _forget(self, item: Item) -> None:
        """Free the rows of an item that is neither in the queue nor in the store."""
        if self._named.get(item.key) is item:
            del self._named[item.key]
        self._slots.release(item.slot.rows, item.row_bytes)
        item.slot = NOWHERE

    def _expire(self) -> None:
        for item in self.store.expired():
            self._settle(item)

    def _time_to_half(self) -> float:
        return self._pace.time_to_half(self._shares.used["tokens"])


def _lookup(kind: GrantKind, found: Item | None) -> metrics.Lookup:
    if found is None or kind is not GrantKind.WAIT:
        return metrics.Lookup.MISS
    return metrics.Lookup.HIT if found.is_done else metrics.Lookup.SHARED
