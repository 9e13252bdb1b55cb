"""SIGTERM and SIGINT: how often this process was asked to stop."""

from __future__ import annotations

import signal
import socket
import time
from contextlib import ExitStack
from types import FrameType
from typing import Self

SAME_SIGNAL_S = 0.5
"""Signals so close behind each other are one request: `timeout` sends to the process and then to its group."""


class StopRequests:
    """Takes both signals while it is entered, which is done on the main thread.

    Attributes:
        count: how many requests there were.
        wakeup: can be read once a signal has come, which `hear` undoes.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last = float("-inf")

    def __enter__(self) -> Self:
        # A waiting main thread is woken by a byte in a socket; the handlers alone would not end its wait.
        self.wakeup, write = socket.socketpair()
        with ExitStack() as held:
            for end in (self.wakeup, write):
                end.setblocking(False)
                held.callback(end.close)
            held.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(write.fileno()))
            for signum in (signal.SIGTERM, signal.SIGINT):
                held.callback(signal.signal, signum, signal.signal(signum, self._take))
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def hear(self) -> None:
        """Note what has woken the thread; the count is right already."""
        self.wakeup.recv(64)

    def _take(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self.count += now - self._last > SAME_SIGNAL_S
        self._last = now
