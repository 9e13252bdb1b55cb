"""The three streams of the device, and the same interface on a CPU, where every call is done when it returns."""

from __future__ import annotations

import contextlib
import time
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Block the calling thread, without the interpreter lock, until the point is reached."""
        ...


class HostEvent:
    """A point that was reached when it was made."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """Returns at once."""


class Streams:
    """`copy_in`, `compute`, `copy_out` as context managers: what is inside goes to that stream. Device thread only."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._in, self._compute, self._out = (torch.cuda.Stream(device) for _ in range(3))

    def copy_in(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._in) if self._cuda else contextlib.nullcontext()

    def compute(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._compute) if self._cuda else contextlib.nullcontext()

    def copy_out(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._out) if self._cuda else contextlib.nullcontext()

    def record(self) -> Event:
        """The point that the current stream has now."""
        if not self._cuda:
            return HostEvent()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, event: Event) -> None:
        """Let the current stream go on only behind `event`."""
        if isinstance(event, torch.cuda.Event):
            event.wait()

    def between(self, start: Event, end: Event) -> float:
        """Seconds between two points that have been reached."""
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            return float(start.elapsed_time(end)) / 1e3
        assert isinstance(start, HostEvent)
        assert isinstance(end, HostEvent)
        return end.at - start.at
