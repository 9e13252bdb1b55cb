"""Rules that assign items to engines, compared in simulated time: opticnerve-server bench balance

The batcher is the server's own, with engines that take so long as a tower on an H200 does, roughly: a fixed time, and a
time by rows and by the length of segments, give or take a tenth. That is not what the rule assumes, which is the larger
of the two. `ours` is the server's rule. `round robin` and `by count`, the fewest items that are not done, bind an item
when it comes to the queue of one engine, as a proxy in front of servers of one device does.

Calls come at random times, each with some images at once. `load` is the work that comes over what the engines could do
in full batches; at `full` so many calls are inside that no engine waits. Latencies are of whole calls.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ..balance import cost_of
from ..batcher import Batcher, Engine, QueuedPart
from ..claims import Item, Progress
from ..ledger import Ledger
from ..messages import Done, Granted, ItemRequest, Land, PartDone, PathState, Reserve, Run, Submit
from ..types import Capacity, ItemPlan, PathPlan

FIXED_S, ROW_S, NOISE = 1.2e-3, 2.4e-6, 0.1
ROWS_PER_UNIT, BUDGET = 4, 5120
PATHS = {"tower": PathState("tower", [BUDGET], 1, 0, 0.0, ROWS_PER_UNIT, 1, [Capacity(BUDGET, 64, 64, 4 * BUDGET)])}
SIDES, WEIGHTS = (224, 336, 448, 672, 896, 1344), (30, 30, 15, 12, 8, 5)
"""Sides of square images and how often each comes: many small ones, few large ones that are half of the work."""
INSIDE = 64
"""Calls of each engine inside at full load."""


class EarlyBatcher(Batcher):
    """Binds every part to an engine when it comes. For one path."""

    def bind(self, part: QueuedPart) -> int:
        """The device."""
        raise NotImplementedError

    def fill(self) -> None:
        queues = self.__dict__.setdefault("queues", {device: deque() for device in self.engines})
        while self._ready:
            part = heapq.heappop(self._ready)[-1]
            queues[self.bind(part)].append(part)
        for device, queue in queues.items():
            engine = self.engines[device]
            while queue and engine.holds(queue[0].plan):
                part = queue.popleft()
                self._ledger.to_device(part.item)
                engine.join(part)
                engine.send(Land(part.work))


class RoundRobin(EarlyBatcher):
    def bind(self, part: QueuedPart) -> int:
        return part.number % len(self.engines)


class ByCount(EarlyBatcher):
    def bind(self, part: QueuedPart) -> int:
        queues: dict[int, deque[QueuedPart]] = self.__dict__["queues"]
        return min(
            self.engines, key=lambda d: len(queues[d]) + len(self.engines[d].open) + len(self.engines[d].running)
        )


RULES: dict[str, type[Batcher]] = {"ours": Batcher, "round robin": RoundRobin, "by count": ByCount}


def plan_of(side: int) -> ItemPlan:
    """A square image of patches of 16, four to a token."""
    units = (side // 32) ** 2
    path = PathPlan(units, 1, units * ROWS_PER_UNIT, 0)
    return ItemPlan("image", side, side, (1, 1, 1), 2, units, {"tower": path}, ())


class Host:
    """Engines in simulated time."""

    def __init__(self, rule: type[Batcher], engines: int, seed: int) -> None:
        self.now = 0.0
        self.ledger = Ledger(max_items=1 << 20, max_tokens=1 << 40, max_bytes=1 << 40)
        self.batcher = rule(self.ledger, lambda: self.now)
        self.busy = dict.fromkeys(range(engines), 0.0)
        self._free_at = dict.fromkeys(range(engines), 0.0)
        self.latencies: list[float] = []
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._calls: dict[int, tuple[float, int]] = {}  # when it came, items that are not done
        self._numbers = itertools.count()
        for device in range(engines):
            self.batcher.engines[device] = Engine(device, PATHS, self._sender(device))

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def run(self, until: float) -> None:
        """Let time pass."""
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            what()
            self.batcher.schedule()
        self.now = until

    def call(self, sides: Iterable[int]) -> None:
        """A call comes, its pixels ready."""
        plans, number = [plan_of(side) for side in sides], next(self._numbers)
        requests = [ItemRequest(plan.tokens, 0, 1, 1) for plan in plans]
        ((_, granted),) = self.ledger.reserve(0, Reserve(number, list(range(len(plans))), requests))
        assert isinstance(granted, Granted)
        self._calls[number] = self.now, len(plans)
        for index, plan in enumerate(plans):
            item, _ = self.ledger.submit(0, Submit(number, index, plan, "bfloat16"))
            assert item is not None
            self.batcher.put(item, [plan])

    @property
    def inside(self) -> int:
        return len(self._calls)

    def _sender(self, device: int) -> Callable[[Land | Run], None]:
        def send(message: Land | Run) -> None:
            if isinstance(message, Run):
                # The batcher enters the parts before it says so.
                parts = [self.batcher.engines[device].running[number] for number in message.numbers]
                seconds = service_time(parts) * self._random.uniform(1 - NOISE, 1 + NOISE)
                self.busy[device] += seconds
                self._free_at[device] = max(self._free_at[device], self.now) + seconds
                self.at(self._free_at[device], lambda: self._computed(device, message.numbers, seconds))

        return send

    def _computed(self, device: int, numbers: list[int], seconds: float) -> None:
        self.batcher.computed(device)
        for part in self.batcher.done(device, Done([PartDone(n, []) for n in numbers], 0.0, seconds, 0.0)):
            self._answered(part.item)

    def _answered(self, item: Item) -> None:
        (claim,) = item.claims
        self.ledger.from_device(item, Progress(0, item.tokens, []))
        self.ledger.release(*claim.id)
        came, left = self._calls.pop(claim.call)
        if left > 1:
            self._calls[claim.call] = came, left - 1
        else:
            self.latencies.append(self.now - came)


def service_time(parts: Iterable[QueuedPart]) -> float:
    """What an engine takes for a batch, in seconds."""
    return FIXED_S + ROW_S * sum(part.cost for part in parts)


def mean_work() -> float:
    """Seconds of an average image in a full batch."""
    costs = [cost_of(plan_of(side), {"tower": ROWS_PER_UNIT}) for side in SIDES]
    return ROW_S * sum(cost * weight for cost, weight in zip(costs, WEIGHTS, strict=True)) / sum(WEIGHTS)


def simulate(rule: type[Batcher], engines: int, load: float | None, images: int, seconds: float, seed: int) -> Host:
    """Calls of `images` images each at a load, or with `load` None as many as keep every engine busy."""
    host, sizes = Host(rule, engines, seed), random.Random(seed)

    def come() -> None:
        host.call(sizes.choices(SIDES, WEIGHTS, k=images))

    if load is None:
        while host.now < seconds:
            while host.inside < INSIDE * engines:
                come()
            host.batcher.schedule()
            host.run(host.now + 1e-3)
        return host
    rate, when = load * engines / (mean_work() * images), 0.0
    while when < seconds:
        when += sizes.expovariate(rate)
        host.at(when, come)
    host.run(seconds)
    return host


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=8, help="devices of the host")
    parser.add_argument("--seconds", type=float, default=20.0, help="simulated time of each row")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(f"{options.engines} engines, {options.seconds:g} s each; images of {SIDES} by {WEIGHTS}")
    print(f"{'images':>6} {'load':>5} {'rule':<12} {'calls/s':>8} {'mean ms':>8} {'p99 ms':>8} {'imbalance':>9}")
    for images, load in [(1, 0.1), (1, 0.5), (1, 0.8), (20, 0.1), (20, 0.5), (20, 0.8), (1, None), (20, None)]:
        for name, rule in RULES.items():
            host = simulate(rule, options.engines, load, images, options.seconds, options.seed)
            latencies, busy = [1e3 * seconds for seconds in host.latencies], list(host.busy.values())
            columns = (
                f"{images:>6} {'full' if load is None else load:>5} {name:<12}",
                f"{len(latencies) / options.seconds:>8.1f} {statistics.mean(latencies):>8.2f}",
                f"{statistics.quantiles(latencies, n=100)[98]:>8.2f} {max(busy) / statistics.mean(busy):>9.3f}",
            )
            print(*columns)


if __name__ == "__main__":
    main()
