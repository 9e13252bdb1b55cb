"""The engine's side of admission: every item inside the server, what it holds, and who owns its slot.

Being granted slots is admission, so the bounds on items, tokens and bytes hold by construction. An item leaves when its
front-end releases it, or dies; its slot is freed then, or once the device no longer uses it.
"""

from __future__ import annotations

import enum
import itertools
import threading
import time
from collections import deque
from dataclasses import dataclass

from .messages import Granted, Occupancy, Refused, Reserve, Slot, Submit
from .slots import SlotAllocator
from .types import ItemPlan


class Owner(enum.Enum):
    """Who may touch an item's slot."""

    FRONTEND = "frontend"  # granted, or rows handed back
    QUEUE = "queue"  # submitted, not on its way to the device
    DEVICE = "device"  # joined a batch: copies may be in flight
    NOBODY = "nobody"  # freed


@dataclass(slots=True, eq=False)
class Item:
    """One item inside the server. The ledger's lock guards `owner` and `released`."""

    frontend: int
    call: int
    index: int
    order: int  # of its call among all calls; earlier calls go first
    slot: Slot
    tokens: int
    nbytes: int  # of the slot and of the encoded media
    owner: Owner = Owner.FRONTEND
    released: bool = False
    plan: ItemPlan | None = None
    dtype: str = ""
    deadline: float = 0.0
    submitted_at: float = 0.0
    pixels_at: int = 0  # where its pixels begin in the landing block

    @property
    def placed(self) -> ItemPlan:
        """The plan of a submitted item."""
        assert self.plan is not None
        return self.plan


class Ledger:
    """Grants and frees slots. Thread-safe: the receiver, the device thread and the finisher call it."""

    def __init__(self, *, max_items: int, max_tokens: int, max_bytes: int) -> None:
        """The arena has `max_bytes` bytes; encoded media are counted against them too, though they lie elsewhere."""
        self._limits = {"items": max_items, "tokens": max_tokens, "bytes": max_bytes}
        self._used = {"items": 0, "tokens": 0, "bytes": 0}
        self._slots = SlotAllocator(max_bytes)
        self._items: dict[tuple[int, int, int], Item] = {}
        self._orders = itertools.count()
        self._lock = threading.Lock()
        self._drained: deque[tuple[float, int]] = deque(maxlen=256)

    def reserve(self, frontend: int, message: Reserve) -> Granted | Refused:
        """Slots for all items of a call, or none and why."""
        with self._lock:
            sizes = [item.pixel_bytes + item.row_bytes for item in message.items]
            wanted = {
                "items": len(message.items),
                "tokens": sum(item.tokens for item in message.items),
                "bytes": sum(
                    SlotAllocator.rounded(size) + item.encoded_bytes
                    for size, item in zip(sizes, message.items, strict=True)
                ),
            }
            for resource, amount in wanted.items():
                if amount > self._limits[resource]:
                    return Refused(message.call, resource, amount, self._limits[resource], retry_after=None)
                if amount + self._used[resource] > self._limits[resource]:
                    return self._refused_for_now(message.call, resource, amount)
            starts: list[int] = []
            for size in sizes:
                start = self._slots.allocate(size)
                if start is None:
                    for given, its_size in zip(starts, sizes, strict=False):
                        self._slots.release(given, its_size)
                    return self._refused_for_now(message.call, "bytes", wanted["bytes"])
                starts.append(start)
            order = next(self._orders)
            granted = []
            for index, request, start, size in zip(message.indices, message.items, starts, sizes, strict=True):
                slot = Slot(start, start + request.pixel_bytes, start + size)
                nbytes = SlotAllocator.rounded(size) + request.encoded_bytes
                self._items[frontend, message.call, index] = Item(
                    frontend, message.call, index, order, slot, request.tokens, nbytes
                )
                granted.append(slot)
            for resource, amount in wanted.items():
                self._used[resource] += amount
            return Granted(message.call, granted)

    def submit(self, frontend: int, message: Submit) -> Item | None:
        """The item whose pixels are ready, now owned by the queue; None if the ledger does not know it."""
        with self._lock:
            item = self._items.get((frontend, message.call, message.index))
            if item is None or item.owner is not Owner.FRONTEND:
                return None
            item.plan, item.dtype, item.deadline = message.plan, message.dtype, message.deadline
            item.submitted_at = time.monotonic()
            item.owner = Owner.QUEUE
            return item

    def release(self, frontend: int, call: int, index: int) -> None:
        """The front-end is done with an item; one that the device is using is freed when it comes back."""
        with self._lock:
            item = self._items.get((frontend, call, index))
            if item is not None:
                self._release(item)

    def disconnect(self, frontend: int) -> int:
        """Release all items of a front-end that is gone; returns how many there were."""
        with self._lock:
            gone = [item for item in self._items.values() if item.frontend == frontend]
            for item in gone:
                self._release(item)
            return len(gone)

    def to_device(self, item: Item) -> bool:
        """The item joins a batch. False if it was released meanwhile: it must not."""
        with self._lock:
            if item.released:
                return False
            item.owner = Owner.DEVICE
            return True

    def from_device(self, item: Item) -> bool:
        """The device is done with the item. False if nobody waits for it any more; its slot is then free."""
        with self._lock:
            self._drained.append((time.monotonic(), item.tokens))
            item.owner = Owner.FRONTEND
            if item.released:
                self._free(item)
                return False
            return True

    def occupancy(self) -> Occupancy:
        """What is inside now."""
        with self._lock:
            return Occupancy(self._used["items"], self._used["tokens"], self._used["bytes"])

    def _release(self, item: Item) -> None:
        item.released = True
        if item.owner is not Owner.DEVICE:
            self._free(item)

    def _free(self, item: Item) -> None:
        item.owner = Owner.NOBODY
        del self._items[item.frontend, item.call, item.index]
        self._slots.release(item.slot.start, item.slot.end - item.slot.start)
        self._used["items"] -= 1
        self._used["tokens"] -= item.tokens
        self._used["bytes"] -= item.nbytes

    def _refused_for_now(self, call: int, resource: str, amount: int) -> Refused:
        return Refused(call, resource, amount, self._limits[resource], retry_after=self._time_to_half())

    def _time_to_half(self) -> float:
        """Seconds until half of the queued tokens are done at the rate of the last batches, between 0.1 and 5."""
        if len(self._drained) < 2:
            return 1.0
        elapsed = time.monotonic() - self._drained[0][0]
        rate = sum(tokens for _, tokens in self._drained) / max(elapsed, 1e-3)
        return min(5.0, max(0.1, self._used["tokens"] / 2 / max(rate, 1.0)))
