"""How fast the server works at present: when to come again after a refusal, and what cannot be done by a deadline.

Nothing is predicted: what the last seconds have measured is taken for what comes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

WINDOW_S = 10.0
"""Older measurements say nothing. A server that refused everything by them forgets them, and tries again."""

ENOUGH = 5
"""Fewer measurements say nothing either."""

KEPT = 64


@dataclass(slots=True)
class Recent:
    """The last durations of one stage."""

    now: Callable[[], float]
    _measured: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, seconds: float) -> None:
        self._measured.append((self.now(), seconds))

    def median(self) -> float | None:
        """Seconds; None where too little was measured within the window."""
        since = self.now() - WINDOW_S
        seconds = [seconds for at, seconds in self._measured if at >= since]
        return statistics.median(seconds) if len(seconds) >= ENOUGH else None


class Pace:
    """Not thread-safe: the ledger's lock guards it. `now` is time.monotonic()."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.preparing = Recent(now)
        """From an item's grant until its pixels are in the slot."""
        self.computing = Recent(now)
        """Of a batch on the device."""
        self.batch_tokens, self.batch_items = math.inf, math.inf
        """What a full batch holds; infinite until the model is loaded."""
        self._drained: deque[tuple[float, int]] = deque(maxlen=256)

    def drained(self, tokens: int) -> None:
        """So many tokens have left the device."""
        self._drained.append((self._now(), tokens))

    def time_to_half(self, tokens: int) -> float:
        """Seconds until half of the queued tokens are done at the rate of the last batches, between 0.1 and 5."""
        if len(self._drained) < 2:
            return 1.0
        elapsed = self._now() - self._drained[0][0]
        rate = sum(tokens for _, tokens in self._drained) / max(elapsed, 1e-3)
        return min(5.0, max(0.1, tokens / 2 / max(rate, 1.0)))

    def time_to_answer(self, tokens: int, items: int, *, busy: bool) -> float | None:
        """The least seconds until a new item has its rows; None where too little was measured.

        `tokens` and `items` count it and all that runs no later, on the device too if that is `busy`: the batch that it
        works at may be over in a moment. While the others run, the item is prepared.
        """
        preparing, batch = self.preparing.median(), self.computing.median()
        if preparing is None or batch is None:
            return None
        batches = math.ceil(max(tokens / self.batch_tokens, items / self.batch_items))
        return max(preparing, (max(batches - busy, 1) - 1) * batch) + batch
