"""The open batch: as full as traffic allows by the time the device takes it, and never delayed by a timer.

While the device is busy, ready items queue; those that fit the open batch join it at once, first come first served by
call, and their pixels begin to land on the device. When the device is free it takes the batch as it is.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .graphs import fits
from .ledger import Item, Ledger
from .types import Capacity, ItemPlan, Load


@dataclass(slots=True)
class Batch:
    """Items that go to the device together, in the order in which their pixels landed."""

    items: list[Item] = field(default_factory=list)
    expired: list[Item] = field(default_factory=list)

    @property
    def plans(self) -> list[ItemPlan]:
        return [item.placed for item in self.items]

    def load(self, path: str) -> Load:
        """What the batch asks of one path."""
        return Load.of(plan.paths[path] for plan in self.plans)


class Batcher:
    """Collects ready items and forms batches.

    `put` and `device_free` may be called from any thread, `take` from the device thread alone.
    """

    def __init__(self, ledger: Ledger, capacities: Mapping[str, Sequence[Capacity]]) -> None:
        """`capacities` bound a batch on each path: the captured ones, or those planned where graphs are off."""
        self._ledger = ledger
        self._capacities = capacities
        self._changed = threading.Condition()
        self._ready: list[tuple[int, int, int, Item]] = []
        self._arrivals = 0
        self._open = Batch()
        self._free = True
        self._stopped = False

    def put(self, item: Item) -> None:
        """An item whose pixels are in its slot."""
        with self._changed:
            self._arrivals += 1
            heapq.heappush(self._ready, (item.order, item.index, self._arrivals, item))
            self._changed.notify()

    def device_free(self) -> None:
        """The device has computed the last batch."""
        with self._changed:
            self._free = True
            self._changed.notify()

    def stop(self) -> None:
        """Let `take` return None once nothing is queued."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def take(self, land: Callable[[Item], int], idle: Callable[[], None]) -> Batch | None:
        """Wait for work and a free device; the batch is then the caller's. None after `stop` when nothing is left.

        `land` starts the copy of a joining item's pixels and says where they begin; `idle` is called about once a
        second while waiting.
        """
        while True:
            with self._changed:
                joined = self._join()
                while not joined and not (self._open.items and self._free):
                    if self._stopped and not self._open.items and not self._ready:
                        return None
                    if not self._changed.wait(timeout=1.0):
                        idle()
                    joined = self._join()
            for item in joined:
                item.pixels_at = land(item)
            with self._changed:
                if not self._free:
                    continue
                batch, self._open = self._open, Batch()
                self._free = False
            self._drop_expired(batch)
            return batch

    def _join(self) -> list[Item]:
        """Move ready items into the open batch while they fit."""
        joined = []
        while self._ready:
            item = self._ready[0][-1]
            if not item.released and not self._fits_with(item):
                break
            heapq.heappop(self._ready)
            if self._ledger.to_device(item):
                self._open.items.append(item)
                joined.append(item)
        return joined

    def _fits_with(self, item: Item) -> bool:
        """Whether a path of the open batch still has room. An item that no capacity holds is alone in its batch."""
        if not self._open.items:
            return True
        plans = [*self._open.plans, item.placed]
        return all(
            isinstance(fits(capacities, Load.of(plan.paths[path] for plan in plans)), Capacity)
            for path, capacities in self._capacities.items()
            if any(plan.paths[path].units for plan in plans)
        )

    @staticmethod
    def _drop_expired(batch: Batch) -> None:
        """Leave out what nobody can receive in time any more: expired items, and those released while they landed."""
        now = time.monotonic()
        kept = [item for item in batch.items if not item.released and item.deadline > now]
        batch.expired = [item for item in batch.items if item.released or item.deadline <= now]
        batch.items = kept
