"""A companion: started again when it dies, and only then."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from opticnerve_server import companion
from opticnerve_server.companion import Companion
from opticnerve_server.processes import Child


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Companion]:
    monkeypatch.setattr(companion, "PAUSE_S", 0.2)
    with closing(Companion("idle", socket.socket.recv, (Child.CONTROL, 4096))) as made:  # ends with its first message
        yield made


def test_one_that_dies_has_an_heir_after_a_pause(idle: Companion, caplog: pytest.LogCaptureFixture) -> None:
    first = idle._child.process
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    died = time.monotonic()
    while idle._child.process is first:
        idle.look_after()
        assert time.monotonic() < died + 30
    assert time.monotonic() > died + 0.2
    assert idle._child.process.is_alive()
    [record] = caplog.records
    assert (record.message, record.__dict__["exit_code"]) == ("companion died, its calls are lost", -signal.SIGKILL)


def test_one_that_was_told_to_stop_has_none(idle: Companion, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        idle.stop(0.0)
        idle.wait(time.monotonic() + 30)
    time.sleep(0.25)
    idle.look_after()
    assert not idle._child.process.is_alive()
    assert not caplog.records


def test_one_that_does_not_stop_is_told_of(idle: Companion, caplog: pytest.LogCaptureFixture) -> None:
    idle.wait(time.monotonic())
    assert [record.message for record in caplog.records] == ["companion did not end in time, its calls are lost"]
