"""What is recorded and awaited on CUDA, with stand-ins for its streams."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from opticnerve_server.streams import Streams

log: list[tuple[str, object]] = []


class FakeStream:
    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda"


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing

    def record(self, stream: FakeStream) -> None:
        log.append(("record", stream))

    def wait(self, stream: FakeStream) -> None:
        log.append(("wait", stream))

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.enable_timing
        assert other.enable_timing
        return 2.0


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: log.append(("launches", stream)))
    return Streams(torch.device("cuda"))


def launched(name: Callable[[], None]) -> FakeStream:
    """The stream that is launched on from now on."""
    log.clear()
    name()
    ((what, stream),) = log[-1:]
    assert what == "launches"
    return stream


def test_events_belong_to_the_stream_named_last(streams: Streams) -> None:
    points = []
    for name in (streams.copy_in, streams.compute, streams.copy_out, streams.copy_in):
        current = launched(name)
        log.clear()
        points.append(streams.record())
        streams.wait(points[0])
        assert log == [("record", current), ("wait", current)]
    assert streams.between(points[0], points[1]) == 2e-3


def test_compute_awaits_what_has_been_copied_in(streams: Streams) -> None:
    copying = launched(streams.copy_in)
    computing = launched(streams.compute)
    assert log == [("record", copying), ("wait", computing), ("launches", computing)]


def test_the_three_streams_differ_and_keep_their_names(streams: Streams) -> None:
    used = [launched(name) for name in (streams.copy_in, streams.compute, streams.copy_out) * 2]
    assert len(set(used)) == 3
    assert used[:3] == used[3:]
