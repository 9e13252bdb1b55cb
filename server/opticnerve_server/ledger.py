"""The engine's side of admission: every item inside the server, what it holds, and who may touch its slot.

Being granted slots is admission, so the bounds on items, tokens and bytes hold by construction. An item leaves when its
front-end releases it, or dies; its slot is freed then, or once the device no longer uses it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from dataclasses import dataclass

from .messages import Granted, Occupancy, Refused, Reserve, Slot, Submit
from .slots import SlotAllocator
from .types import ItemPlan


@dataclass(slots=True, eq=False)
class Item:
    """One item inside the server.

    Its slot is the front-end's until it is submitted, then the device's for reading pixels, and piece by piece the
    front-end's again as rows are reported. The ledger's lock guards the last four fields.
    """

    frontend: int
    call: int
    index: int
    order: int  # of its call among all calls; earlier calls go first
    slot: Slot
    tokens: int
    nbytes: int  # of the slot and of the encoded media
    plan: ItemPlan | None = None
    dtype: str = ""
    deadline: float = 0.0
    submitted_at: float = 0.0
    on_device: int = 0  # parts that copies or kernels may be using
    failed: bool = False  # the front-end has been told
    released: bool = False  # the front-end is done with it

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
        self.on_device = 0
        """Parts that copies or kernels may be using."""
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
        """The item whose pixels are ready; None if the ledger does not know it, or has seen it submitted."""
        with self._lock:
            item = self._items.get((frontend, message.call, message.index))
            if item is None or item.plan is not None:
                return None
            item.plan, item.dtype, item.deadline = message.plan, message.dtype, message.deadline
            item.submitted_at = time.monotonic()
            return item

    def release(self, frontend: int, call: int, index: int) -> None:
        """The front-end is done with an item; its slot is freed now, or when the device is done with it too."""
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
        """A part of the item joins a batch. False if nobody waits for it any more: it must not."""
        with self._lock:
            if item.released or item.failed:
                return False
            item.on_device += 1
            self.on_device += 1
            return True

    def from_device(self, item: Item, rows: int) -> bool:
        """The device is done with a part that has `rows` rows. False if nobody waits for them."""
        with self._lock:
            self._drained.append((time.monotonic(), rows))
            item.on_device -= 1
            self.on_device -= 1
            if item.released and not item.on_device:
                self._free(item)
            return not item.released and not item.failed

    def fail(self, item: Item) -> bool:
        """Mark the item as failed, so that no other part of it runs. False if nobody has to be told."""
        with self._lock:
            told, item.failed = item.failed, True
            return not told and not item.released

    def occupancy(self) -> Occupancy:
        """What is inside now."""
        with self._lock:
            return Occupancy(self._used["items"], self._used["tokens"], self._used["bytes"])

    def _release(self, item: Item) -> None:
        item.released = True
        if not item.on_device:
            self._free(item)

    def _free(self, item: Item) -> None:
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
