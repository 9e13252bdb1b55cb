"""Hits and misses: counted into the metrics, and told in one log line a minute with traffic."""

from __future__ import annotations

import logging
import time

from . import metrics
from .dispatcher import Finished
from .types import Outcome

log = logging.getLogger(__name__)


class Counts:
    """Counts of dispatches: into metrics, and one log line a minute with traffic."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._since = time.monotonic()
        self._items = {Outcome.HIT: 0, Outcome.MISS: 0}
        self._units = {"useful": 0, "padding": 0}

    def add(self, finished: Finished) -> None:
        """Count a batch; on the finisher."""
        metrics.BATCH_ITEMS.observe(len(finished.results))
        for run in finished.runs:
            metrics.DISPATCHES.labels(run.path, run.outcome, run.reason).inc()
            metrics.DISPATCHED_ITEMS.labels(run.path, run.outcome).inc(run.load.items)
            metrics.EXECUTE_DURATION.labels(run.path, run.outcome).observe(finished.execute_s)
            self._items[run.outcome] += run.load.items
            if run.outcome is Outcome.HIT:
                metrics.GRAPH_REPLAYS.labels(run.path, str(run.budget)).inc()
                for kind, units in (("useful", run.load.units), ("padding", run.budget - run.load.units)):
                    metrics.GRAPH_TOKENS.labels(run.path, kind).inc(units)
                    self._units[kind] += units
        if time.monotonic() - self._since >= 60:
            self._log()

    def _log(self) -> None:
        hits, misses = self._items[Outcome.HIT], self._items[Outcome.MISS]
        computed = sum(self._units.values())
        log.info(
            "graph hits",
            extra={
                "hits": hits,
                "misses": misses,
                "hit_ratio": round(hits / max(1, hits + misses), 3),
                "padding_ratio": round(self._units["padding"] / max(1, computed), 3),
            },
        )
        self._reset()
