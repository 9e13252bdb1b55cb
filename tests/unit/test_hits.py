"""Hits and misses in the metrics, and the line that tells them: after a burst too, and never without traffic."""

import logging

import pytest

from opticnerve_server import hits
from opticnerve_server.dispatcher import Finished, PathRun
from opticnerve_server.hits import Counts
from opticnerve_server.types import Load, Outcome, Reason


def finished(outcome: Outcome, units: int, items: int) -> Finished:
    budget, reason = (128, Reason.FITS) if outcome is Outcome.HIT else (0, Reason.TOO_MANY_TOKENS)
    run = PathRun("default", outcome, budget, reason, Load(units, items, items, 4 * units))
    return Finished(results=[], runs=[run], began_at=0.0, host_s=0.0, execute_s=0.01, copy_s=0.001)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, int, float]]:
    return [
        (record.hits, record.misses, record.padding_ratio)  # type: ignore[attr-defined]
        for record in caplog.records
        if record.getMessage() == "graph hits"
    ]


def test_a_line_tells_what_came_in_since_the_last(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    counts = Counts()
    counts.add(finished(Outcome.HIT, 96, 3))
    counts.add(finished(Outcome.MISS, 6000, 1))
    counts.tell_if_due()
    assert lines(caplog) == []
    monkeypatch.setattr(hits, "PERIOD_S", 0.0)
    counts.tell_if_due()
    assert lines(caplog) == [(3, 1, 0.25)]
    counts.tell_if_due()
    counts.tell()
    assert len(lines(caplog)) == 1
