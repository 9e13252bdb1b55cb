"""The open batch: as full as traffic allows by the time the device takes it, and never delayed by a timer.

While the device is busy, ready items queue; those that fit the open batch join it at once, first come first served by
call, and their pixels begin to land on the device. When the device is free it takes the batch as it is. An item larger
than any graph, a long video, queues as several parts where its segments allow, and alone otherwise.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .graphs import fits
from .ledger import Item, Ledger
from .models.base import Planner
from .types import Capacity, ItemPlan, Load


class Failure(NamedTuple):
    """Why an item has no rows: a reason of the table in `errors.py`, a sentence, when a retry makes sense."""

    reason: str
    message: str
    retry_after: float | None = None


@dataclass(slots=True)
class Part:
    """A contiguous run of an item's units; almost always the whole item."""

    item: Item
    plan: ItemPlan
    pixels: int = 0  # where its pixels begin, in bytes from those of the item
    first_row: int = 0
    landed_at: int = 0  # where its pixels begin in the landing block
    failure: Failure | None = None  # it could not land


@dataclass(slots=True)
class Batch:
    """Parts that go to the device together, in the order in which their pixels landed."""

    parts: list[Part] = field(default_factory=list)
    dropped: list[Part] = field(default_factory=list)

    @property
    def plans(self) -> list[ItemPlan]:
        return [part.plan for part in self.parts]

    def load(self, path: str) -> Load:
        """What the batch asks of one path."""
        return Load.of(plan.paths[path] for plan in self.plans)


class Batcher:
    """Collects ready items and forms batches.

    `put` and `device_free` may be called from any thread, `take` from the device thread alone.
    """

    def __init__(self, ledger: Ledger, planner: Planner, capacities: Mapping[str, Sequence[Capacity]]) -> None:
        """`capacities` bound a batch on each path: the captured ones, or those planned where graphs are off."""
        self._ledger = ledger
        self._planner = planner
        self._capacities = capacities
        self._changed = threading.Condition()
        self._ready: list[tuple[tuple[float, int], int, int, Part]] = []
        self._arrivals = 0
        self._open = Batch()
        self._free = True
        self._stopped = False

    def put(self, item: Item) -> int:
        """Queue an item whose pixels are in its slot; returns the number of its parts."""
        parts, pixels, row = [], 0, 0
        for plan in self._planner.split(item.placed, lambda plan: self._hold([plan])):
            parts.append(Part(item, plan, pixels, row))
            pixels, row = pixels + plan.pixel_bytes, row + plan.tokens
        with self._changed:
            for part in parts:
                self._arrivals += 1
                heapq.heappush(self._ready, (item.order, item.index, self._arrivals, part))
            self._changed.notify()
        return len(parts)

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

    def take(self, land: Callable[[Part], int], idle: Callable[[], None]) -> Batch | None:
        """Wait for work and a free device; the batch is then the caller's. None after `stop` when nothing is left.

        `land` starts the copy of a joining part's pixels and says where they begin; `idle` is called about once a
        second while waiting, and may take its time: neither is called under the lock.
        """
        while True:
            quiet = False
            with self._changed:
                joined = self._join()
                if not joined and not (self._open.parts and self._free):
                    if self._stopped and not self._open.parts and not self._ready:
                        return None
                    quiet = not self._changed.wait(timeout=1.0)
                    joined = self._join()
            if quiet:
                idle()
            for part in joined:
                part.landed_at = land(part)
            with self._changed:
                if not (self._open.parts and self._free):
                    continue
                batch, self._open = self._open, Batch()
                self._free = False
            self._drop_unwanted(batch)
            return batch

    def _join(self) -> list[Part]:
        """Move ready parts into the open batch while they fit."""
        joined = []
        while self._ready:
            part = self._ready[0][-1]
            # A part that no capacity holds is alone in its batch.
            if self._open.parts and not self._hold([*self._open.plans, part.plan]):
                break
            heapq.heappop(self._ready)
            if self._ledger.to_device(part.item):
                self._open.parts.append(part)
                joined.append(part)
        return joined

    def _drop_unwanted(self, batch: Batch) -> None:
        """Leave out what could not land, and what nobody can receive any more: it expired, or was released."""
        now, parts = time.monotonic(), batch.parts
        batch.parts = []
        for part in parts:
            goes = part.failure is None and self._ledger.is_wanted(part.item, now)
            (batch.parts if goes else batch.dropped).append(part)

    def _hold(self, plans: Sequence[ItemPlan]) -> bool:
        """Whether on every path some capacity holds all of `plans`."""
        return all(
            isinstance(fits(capacities, Load.of(plan.paths[path] for plan in plans)), Capacity)
            for path, capacities in self._capacities.items()
            if any(plan.paths[path].units for plan in plans)
        )
