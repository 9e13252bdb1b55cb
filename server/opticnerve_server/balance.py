"""Which engine a part goes to: the one where it is predicted to end first.

The cost of a part is what arithmetic says of its plan, in rows of plain work. The time of a batch is its cost times the
pace that the engines keep, or that of FLOOR_ROWS if this is more: below, launches and weights are what takes the time.
So small parts share one replay however many engines are idle, what is larger spreads, and what comes while all are busy
goes where the device is free first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from .types import ItemPlan

FLOOR_ROWS = 1024
"""A replay of fewer rows takes no less time: Qwen3-VL's tower on an H200 needs 2 ms for 196 rows and 2.6 for 1024."""

SEGMENT_ROWS = 7000
"""Rows of a segment whose attention takes as long as its GEMMs. A row and layer of
width d and MLP width f takes 8 d^2 + 4 d f operations, and 4 d for each row of its segment: equal at 2 d + f rows, 6600
for Qwen3-VL; measured 7090."""

FIRST_PACE = 2.5e-6
"""Seconds a row until the first batch tells: those of Qwen3-VL's tower on an H200."""

MEMORY = 0.2
"""Weight of the newest batch in the pace."""

WINDOW_S = 60
"""Time over which the balance is judged."""


def cost_of(plan: ItemPlan, rows_per_unit: Mapping[str, int]) -> float:
    """The work that a part is, in rows: GEMMs by its units, attention by the length of its segments."""
    cost = 0.0
    for path, asked in plan.paths.items():
        rows = asked.units * rows_per_unit[path]
        cost += rows * (1 + rows / max(1, asked.segments) / SEGMENT_ROWS)
    return cost


class Pace:
    """Seconds that engines take for a row of work; those of one host are alike."""

    def __init__(self) -> None:
        self.seconds = FIRST_PACE

    def time(self, cost: float) -> float:
        """Predicted seconds of a batch."""
        return self.seconds * max(FLOOR_ROWS, cost)

    def learn(self, cost: float, seconds: float) -> None:
        """A batch has taken so long."""
        self.seconds += MEMORY * (seconds / max(FLOOR_ROWS, cost) - self.seconds)


class Candidate(Protocol):
    """An engine with its open batch."""

    cost: float
    """Of the open batch."""
    free_at: float
    """When it is predicted to have computed what it started, time.monotonic(); in the past: it is late, or idle."""

    @property
    def started(self) -> int:
        """Batches that it has not computed."""
        ...

    def holds(self, plan: ItemPlan) -> bool:
        """Whether the open batch has room for a part."""
        ...


C = TypeVar("C", bound=Candidate)


def choose(engines: Iterable[C], plan: ItemPlan, cost: float, pace: Pace, now: float) -> C | None:
    """The engine whose open batch a part joins: where that ends first; of equals an idle one, then the fullest.

    A device that is late is expected to be late by as much again: one slower than others, or stuck, gets what they do
    not take earlier. None: all are full.
    """

    def ends(engine: C) -> tuple[float, int, float]:
        free_in = abs(engine.free_at - now) if engine.started else 0.0
        return now + free_in + pace.time(engine.cost + cost), engine.started, -engine.cost

    return min((engine for engine in engines if engine.holds(plan)), key=ends, default=None)


class Imbalance:
    """Longest over mean busy time of the engines in the last minute: 1 is perfect."""

    def __init__(self) -> None:
        self._before: deque[dict[int, float]] = deque(maxlen=WINDOW_S)

    def update(self, busy: Mapping[int, float]) -> float:
        """To be called every second with the seconds that each engine has computed so far, idle ones included."""
        began = self._before[0] if self._before else {}
        self._before.append(dict(busy))
        spent = [seconds - began.get(device, 0.0) for device, seconds in busy.items()]
        return max(spent) * len(spent) / sum(spent) if any(spent) else 1.0
