"""Hits and misses: counted into the metrics, and told in one log line a minute with traffic."""

from __future__ import annotations

import logging
import threading
import time

from . import metrics
from .dispatcher import Finished, PathRun
from .metrics import TokenKind
from .types import Outcome

log = logging.getLogger(__name__)

PERIOD_S = 60.0


class Counts:
    """Counts of dispatches: into metrics, and one log line a minute with traffic. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._since = time.monotonic()
        self._items = {Outcome.HIT: 0, Outcome.MISS: 0}
        self._units = dict.fromkeys(TokenKind, 0)

    def add(self, finished: Finished) -> None:
        """Count a batch."""
        metrics.BATCH_ITEMS.observe(len(finished.results))
        with self._lock:
            for run in finished.runs:
                self._add(run, finished.execute_s)

    def tell_if_due(self) -> None:
        """Log what came in since the last line, if that was a minute ago; to be called every second or so."""
        if time.monotonic() - self._since >= PERIOD_S:
            self.tell()

    def tell(self) -> None:
        """Log what came in since the last line, if anything did."""
        with self._lock:
            hits, misses = self._items[Outcome.HIT], self._items[Outcome.MISS]
            units = self._units
            self._reset()
        if not hits + misses:
            return
        log.info(
            "graph hits",
            extra={
                "hits": hits,
                "misses": misses,
                "hit_ratio": round(hits / (hits + misses), 3),
                "padding_ratio": round(units[TokenKind.PADDING] / max(1, sum(units.values())), 3),
            },
        )

    def _add(self, run: PathRun, execute_s: float) -> None:
        metrics.DISPATCHES.labels(run.path, run.outcome, run.reason).inc()
        metrics.DISPATCHED_ITEMS.labels(run.path, run.outcome).inc(run.load.items)
        metrics.EXECUTE_DURATION.labels(run.path, run.outcome).observe(execute_s)
        self._items[run.outcome] += run.load.items
        if run.outcome is Outcome.MISS:
            return
        metrics.GRAPH_REPLAYS.labels(run.path, str(run.budget)).inc()
        useful = {TokenKind.USEFUL: run.load.units, TokenKind.PADDING: run.budget - run.load.units}
        for kind, units in useful.items():
            metrics.GRAPH_TOKENS.labels(run.path, kind).inc(units)
            self._units[kind] += units
