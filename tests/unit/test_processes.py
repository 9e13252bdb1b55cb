"""What the supervisor makes of a child that is gone; what a child leaves to the garbage collector."""

from __future__ import annotations

import gc
import logging
import socket
import weakref
from contextlib import closing

import pytest

from opticnerve_server.messages import Message, Occupancy, PhaseChange, Stop
from opticnerve_server.processes import Child, settle
from opticnerve_server.types import Phase


@pytest.mark.parametrize(("last", "warnings"), [(Stop(0.0), 0), (PhaseChange(Phase.READY), 1)])
def test_only_a_child_that_was_not_told_to_stop_is_missed(
    last: Message, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Child("child", socket.socket.recv, (Child.CONTROL, 4096))) as child:  # ends with its first message
        child.send(last)
        assert child.wait(30)
        with caplog.at_level(logging.WARNING):
            child.send(Occupancy(1, 2, 3))
    assert [record.message for record in caplog.records] == ["child is gone"] * warnings


class Knot:
    """Garbage that counting references does not find."""

    def __init__(self) -> None:
        self.itself = self


def test_the_collector_looks_only_at_what_comes_after() -> None:
    try:
        settle()
        assert len(gc.get_objects()) < gc.get_freeze_count() / 10
        knot = weakref.ref(Knot())
        gc.collect()
        assert knot() is None
    finally:
        gc.unfreeze()
