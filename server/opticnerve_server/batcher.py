"""The open batches, one an engine: as full as traffic allows when the device takes them, and never delayed by a timer.

While a device is busy, ready parts join the open batches, first come first served by call, and their pixels begin to
land. When the device is free it takes its batch as it is; a batch that is full it takes ahead, behind the one that it
computes, for nothing would be gained by waiting. Parts that no open batch has room for stay in one queue: they go to
whichever engine takes its batch first. Later ones that fit into the padding of the graph that a batch takes go with it,
which takes as long without them. An item larger than any graph, a long video, comes as several parts where its segments
allow, and is alone in its batch otherwise.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from .balance import Pace, choose, cost_of
from .budgets import fits, some_holds
from .claims import Item
from .ledger import Ledger
from .messages import Done, Land, PathState, Run, Work
from .types import Capacity, ItemPlan, Load

MAX_STARTED = 2
"""Batches that a device has and has not computed: one, and a full one behind it."""

LOOKED_AT = 16
"""Waiting parts that may find a place in the padding of a batch. Simulated with images of 128 to 1536 pixels a side:
0.6 % of a full batch is padding then, 3.7 without."""


@dataclass(slots=True, eq=False)
class QueuedPart:
    """A contiguous run of an item's units; almost always the whole item."""

    item: Item
    plan: ItemPlan
    number: int
    cost: float
    pixels: int = 0  # where its pixels begin, in bytes from those of the item
    first_row: int = 0
    retried: bool = False  # an engine died with it

    @property
    def work(self) -> Work:
        """What the engine is told."""
        item = self.item
        pixels = item.slot.pixels + self.pixels
        return Work(self.number, self.plan, pixels, item.slot.rows, self.first_row, item.dtype, item.trace)


@dataclass(slots=True, eq=False)
class Engine:
    """An engine as the batcher sees it: what it has been given."""

    device: int
    paths: Mapping[str, PathState]  # what bounds a batch, by path
    send: Callable[[Land | Run], None]
    works: bool = True
    predicted: deque[float] = field(default_factory=deque)  # seconds of the batches that it has not computed
    free_at: float = 0.0
    cost: float = 0.0  # of the open batch, as are the next
    load: dict[str, Load] = field(default_factory=dict)
    open: dict[int, QueuedPart] = field(default_factory=dict)
    running: dict[int, QueuedPart] = field(default_factory=dict)  # started, not reported

    @property
    def started(self) -> int:
        """Batches that it has not computed."""
        return len(self.predicted)

    def holds(self, plan: ItemPlan) -> bool:
        """Whether the open batch has room. A part that no capacity of one path holds is alone in its batch."""
        return not self.open or all(
            some_holds(self.paths[path].capacities, load) for path, load in self._loads(plan).items() if load.units
        )

    def pads(self, plan: ItemPlan) -> bool:
        """Whether the graphs of the open batch have padding for a part: with it, the budgets are the same. Those of a
        device that does not compute have none.
        """

        def budget(path: str, load: Load) -> int:
            state = self.paths[path]
            chosen = fits(state.capacities, load) if load.units and state.budgets else None
            return chosen.units if isinstance(chosen, Capacity) else 0

        return self.works and all(
            0 < budget(path, self._load(path)) == budget(path, load)
            for path, load in self._loads(plan).items()
            if load.units
        )

    def join(self, part: QueuedPart) -> None:
        self.open[part.number] = part
        self.cost += part.cost
        self.load = self._loads(part.plan)

    def take(self) -> list[QueuedPart]:
        """Close the open batch."""
        parts, self.open, self.load, self.cost = list(self.open.values()), {}, {}, 0.0
        return parts

    def forget(self, number: int) -> QueuedPart | None:
        """A part that has come back; None if it had before."""
        part = self.running.pop(number, None) or self.open.pop(number, None)
        if not self.open:
            self.take()  # what it asked for is room again; in a batch with others its pixels may lie before theirs
        return part

    def _load(self, path: str) -> Load:
        return self.load.get(path) or Load(0, 0, 0, 0)

    def _loads(self, plan: ItemPlan) -> dict[str, Load]:
        """With one more part."""
        return {path: self._load(path).plus(asked) for path, asked in plan.paths.items()}


class Batcher:
    """Forms batches for any number of engines. For one thread."""

    def __init__(self, ledger: Ledger, now: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._now = now
        self._ready: list[tuple[tuple[float, int], int, int, QueuedPart]] = []
        self._numbers = 0
        self.pace = Pace()
        self.engines: dict[int, Engine] = {}  # by device

    def put(self, item: Item, plans: Iterable[ItemPlan]) -> None:
        """Queue an item whose pixels are in its slot, as these parts in order. There is an engine."""
        paths = next(iter(self.engines.values())).paths
        rows_per_unit = {name: path.rows_per_unit for name, path in paths.items()}
        pixels = row = 0
        for plan in plans:
            self._numbers += 1
            self._queue(QueuedPart(item, plan, self._numbers, cost_of(plan, rows_per_unit), pixels, row))
            pixels, row = pixels + plan.pixel_bytes, row + plan.tokens

    def schedule(self) -> list[QueuedPart]:
        """Let ready parts join open batches, and devices take theirs; what was dropped: nobody waits for it."""
        dropped: list[QueuedPart] = []
        self.fill()
        while taking := self._taking():
            for engine in taking:
                dropped += self._start(engine)
            self.fill()  # what had no room lands while these run
        return dropped

    def fill(self) -> None:
        """Let ready parts join open batches while one holds the first of them."""
        now = self._now()
        while self._ready:
            part = self._ready[0][-1]
            engine = choose(self._able(), part.plan, part.cost, self.pace, now)
            if engine is None:
                break
            heapq.heappop(self._ready)
            self._join(engine, part)

    def computed(self, device: int) -> None:
        """A device could take another batch."""
        engine = self.engines[device]
        engine.predicted.popleft()
        engine.free_at = self._now() + sum(engine.predicted)

    def done(self, device: int, message: Done) -> list[QueuedPart]:
        """The parts that have run together, in the order of the message."""
        engine = self.engines[device]
        parts = [engine.running.pop(done.number) for done in message.parts]
        self.pace.learn(sum(part.cost for part in parts), message.execute_s)
        return parts

    def lose(self, device: int) -> list[QueuedPart]:
        """An engine is gone. What it had is queued again, each part once; those that cannot be, which have failed."""
        engine = self.engines.pop(device)
        failed = []
        for part in [*engine.running.values(), *engine.open.values()]:
            if not self.again(part):
                failed.append(part)
        return failed

    def again(self, part: QueuedPart) -> bool:
        """Queue a part anew that its engine could not run; False if it was before, or no engine works."""
        if part.retried or not any(engine.works for engine in self.engines.values()):
            return False
        part.retried = True
        self._ledger.unrun(part.item)
        self._queue(part)
        return True

    def _queue(self, part: QueuedPart) -> None:
        heapq.heappush(self._ready, (part.item.order, part.item.index, part.number, part))

    def _join(self, engine: Engine, part: QueuedPart, *, early: bool = False) -> None:
        if self._ledger.to_device(part.item, early=early):
            engine.join(part)
            engine.send(Land(part.work))

    def _fill_padding(self, engine: Engine) -> None:
        """Let waiting parts into the padding of an open batch, in their order."""
        looked_at = [heapq.heappop(self._ready) for _ in range(min(LOOKED_AT, len(self._ready)))]
        for entry in looked_at:
            if engine.pads(entry[-1].plan):
                self._join(engine, entry[-1], early=True)
            else:
                heapq.heappush(self._ready, entry)

    def _able(self) -> list[Engine]:
        """The engines whose devices compute; all if none does: it fails what comes, and finds out whether it does."""
        engines = list(self.engines.values())
        return [engine for engine in engines if engine.works] or engines

    def _taking(self) -> list[Engine]:
        """Whose devices take their batches now: all that have no other. If none is idle, and parts are left that no
        open batch has room for, it is the one that is free first: then there is room, and the others fill on.
        """
        waiting = [engine for engine in self.engines.values() if engine.open]
        idle = [engine for engine in waiting if not engine.started]
        if idle or not self._ready:
            return idle
        ahead = [engine for engine in waiting if engine.started < MAX_STARTED]
        return [min(ahead, key=lambda engine: engine.free_at)] if ahead else []

    def _start(self, engine: Engine) -> list[QueuedPart]:
        """Let a device take its open batch; what is left out: it expired, or was released."""
        self._fill_padding(engine)
        now, taken = self._now(), engine.take()
        wanted = {part.number: part for part in taken if self._ledger.is_wanted(part.item, now)}
        engine.running |= wanted
        seconds = self.pace.time(sum(part.cost for part in wanted.values())) if wanted else 0.0
        engine.predicted.append(seconds)
        engine.free_at = max(engine.free_at, now) + seconds
        engine.send(Run(list(wanted)))
        return [part for part in taken if part.number not in wanted]
