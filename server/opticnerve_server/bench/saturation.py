"""How many images a second a tower encodes in process when it never waits for calls, and what the host needs between.

As many calls at a time as keep two largest batches full: each is given to the engine again when all its rows are in
their slots, so that the copies of neighbouring batches run under every replay, as a server's do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..batcher import QueuedPart
from ..claims import Item
from ..graphs import Graph, GraphManager
from ..models.base import ImageItem
from ..selftest import write_batch
from ..types import ItemPlan, Load
from .build import Built, tight
from .calls import engine_of, place
from .inprocess import InProcessEngine
from .policies import Policy
from .timing import device_ms

IMAGE = ImageItem(336, 336)

HOST_IMAGES = 8
"""Images of the batches by which the host's time is measured."""

WARM_SHARE = 0.2
"""Of the time, before anything is counted."""


class _Loop:
    """Calls that start again as soon as they end, until a time. `on_finished` of an engine."""

    def __init__(self, engine: InProcessEngine, calls: Sequence[Sequence[Item]], until: float) -> None:
        self._engine, self._calls, self._until = engine, calls, until
        self._call_of = {id(item): number for number, items in enumerate(calls) for item in items}
        self._left = [self._tokens(number) for number in range(len(calls))]
        self.ended: list[tuple[float, int]] = []  # time.perf_counter(), images
        self.running = len(calls)

    def _tokens(self, call: int) -> int:
        return sum(item.placed.tokens for item in self._calls[call])

    def __call__(self, parts: Sequence[QueuedPart]) -> None:
        again: list[Item] = []
        for part in parts:
            call = self._call_of[id(part.item)]
            self._left[call] -= part.plan.tokens
            if self._left[call]:
                continue
            now = time.perf_counter()
            self.ended.append((now, len(self._calls[call])))
            if now >= self._until:
                self.running -= 1
                continue
            self._left[call] = self._tokens(call)
            again += self._calls[call]
        self._engine.put(again)


@dataclass(frozen=True, slots=True)
class Host:
    """Batches of HOST_IMAGES one behind another, medians in milliseconds."""

    launch_ms: float  # what the device thread spends on a batch: landing pixels, metadata, launches
    period_ms: float  # from one batch computed to the next
    replay_ms: float  # of that, the replay on the device alone

    @property
    def between_ms(self) -> float:
        """From the end of a replay to the begin of the next: host, gather and moves."""
        return self.period_ms - self.replay_ms


def run(engine: InProcessEngine, calls: Sequence[Sequence[Item]], seconds: float) -> float:
    """Images a second while all `calls` are kept inside; the records of the engine are those of that time."""
    loop = _Loop(engine, calls, time.perf_counter() + seconds)
    engine.on_finished = loop
    engine.landed_first = False
    engine.forget()
    began = time.perf_counter()
    engine.put([item for items in calls for item in items])
    while loop.running and engine.error is None:
        time.sleep(0.01)
    if engine.error is not None:
        raise engine.error
    first, last = began + WARM_SHARE * seconds, began + seconds
    return sum(images for at, images in loop.ended if first <= at < last) / (last - first)


def throughput(built: Built, policy: Policy, images: int, seconds: float) -> float:
    """Images a second, by calls of so many images of 336 x 336."""
    plans = [built.tower.planner.plan(IMAGE)] * images
    largest = sum(
        capacities[-1].units * built.tower.planner.paths[path].tokens_per_unit
        for path, capacities in policy.capacities.items()
    )
    tokens = sum(plan.tokens for plan in plans)
    with engine_of(built.tower, policy) as engine:
        calls = [place(engine, policy, plans) for _ in range(max(2, -(-2 * largest // tokens)))]
        return run(engine, calls, seconds)


def host_time(built: Built, seconds: float, repeats: int) -> Host:
    """The host's part of batches of HOST_IMAGES, by graphs of exactly their size. Inference mode."""
    tower = built.tower
    plans: list[ItemPlan] = [tower.planner.plan(IMAGE)] * HOST_IMAGES
    loads = {path: Load.of(plan.paths[path] for plan in plans) for path in tower.planner.paths}
    capacities = {path: [tight(load)] if load.units else [] for path, load in loads.items()}
    graphs = GraphManager(tower, capacities)
    graphs.capture(lambda *_: None, on_failure="fail")
    policy = Policy("ours", graphs, capacities, use_graphs=True)
    replay_ms = 0.0
    for path, load in loads.items():
        if load.units and isinstance(graph := graphs.choose(path, load), Graph):
            write_batch(tower, path, plans, graph.packing, graphs.arena, seed=0)
            replay_ms += device_ms(graph.replay, tower.device, repeats)
    with engine_of(tower, policy) as engine:
        run(engine, [place(engine, policy, plans) for _ in range(4)], seconds)
    periods = [after - before for before, after in pairwise(engine.computed_at)]
    return Host(1e3 * statistics.median(engine.host_s), 1e3 * statistics.median(periods), replay_ms)
