"""Requests to stop: which signals are one, that they wake who waits, and that the process is as before behind them."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import wait
from types import SimpleNamespace

import pytest

from opticnerve_server import signals
from opticnerve_server.signals import StopRequests


def test_signals_close_behind_each_other_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((100.0, 100.4, 101.0, 101.4))
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: next(times)))
    counts = []
    with StopRequests() as stops:
        for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(signum)
            counts.append(stops.count)
    assert counts == [1, 1, 2, 2]


def test_a_signal_wakes_who_waits_until_it_is_heard() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequests() as stops:
        assert wait([stops.wakeup], 0) == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait([stops.wakeup], 10) == [stops.wakeup]
        stops.hear()
        assert wait([stops.wakeup], 0) == []
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert signal.set_wakeup_fd(-1) == -1
    assert stops.wakeup.fileno() == -1, "closed"
