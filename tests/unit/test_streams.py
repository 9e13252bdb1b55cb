"""What is recorded and awaited on CUDA, with stand-ins for its streams."""

from __future__ import annotations

import pytest
import torch

from opticnerve_server.streams import Streams

log: list[tuple[str, object]] = []


class FakeStream:
    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda"


class FakeEvent:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: FakeStream) -> None:
        log.append(("record", stream))

    def wait(self, stream: FakeStream) -> None:
        log.append(("wait", stream))

    def elapsed_time(self, other: FakeEvent) -> float:
        return 2.0


def test_events_belong_to_the_stream_named_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: log.append(("launches", stream)))
    streams = Streams(torch.device("cuda"))
    points = []
    for name in (streams.copy_in, streams.compute, streams.copy_out, streams.copy_in):
        log.clear()
        name()
        points.append(streams.record())
        streams.wait(points[0])
        assert [what for what, _ in log] == ["launches", "record", "wait"]
        assert len({stream for _, stream in log}) == 1
    assert streams.between(points[0], points[1]) == 2e-3


def test_the_three_streams_differ_and_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    used: list[FakeStream] = []
    monkeypatch.setattr(torch.cuda, "set_stream", used.append)
    streams = Streams(torch.device("cuda"))
    for name in (streams.copy_in, streams.compute, streams.copy_out) * 2:
        name()
    assert len(set(used)) == 3
    assert used[:3] == used[3:]
