"""The three streams of the device, and the same interface on a CPU, where every call is done when it returns."""

from __future__ import annotations

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
    """`copy_in`, `compute`, `copy_out`: what the device thread launches from then on goes to that stream.

    For that thread alone, which names a stream before it launches anything; `between` may be called from any thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._in, self._compute, self._out = (torch.cuda.Stream(device) for _ in range(3))
            self._current = self._compute
            self._copied = torch.cuda.Event()  # recorded anew each time: a wait keeps the point that it was given

    def copy_in(self) -> None:
        if self._cuda:
            self._use(self._in)

    def compute(self) -> None:
        """Also awaits what `copy_in` has by now."""
        if self._cuda:
            self._copied.record(self._in)
            self._copied.wait(self._compute)
            self._use(self._compute)

    def copy_out(self) -> None:
        if self._cuda:
            self._use(self._out)

    def record(self) -> Event:
        """The point that the current stream has now."""
        if not self._cuda:
            return HostEvent()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._current)
        return event

    def wait(self, event: Event) -> None:
        """Let the current stream go on only behind `event`."""
        if isinstance(event, torch.cuda.Event):
            event.wait(self._current)

    def between(self, start: Event, end: Event) -> float:
        """Seconds between two points that have been reached."""
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            return float(start.elapsed_time(end)) / 1e3
        assert isinstance(start, HostEvent)
        assert isinstance(end, HostEvent)
        return end.at - start.at

    def _use(self, stream: torch.cuda.Stream) -> None:
        # As a context manager it would also ask for the stream before, and go back to it: several times the cost.
        torch.cuda.set_stream(stream)
        self._current = stream
