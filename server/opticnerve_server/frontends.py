"""The front-ends of a server: children that share one port, replaced when they end. For the supervisor's thread."""

from __future__ import annotations

import itertools
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator

from . import messages
from .info import ServerState
from .messages import Attach, Devices, PhaseChange, Stop
from .processes import Child

log = logging.getLogger(__name__)

CRASHES, CRASH_WINDOW_S = 5, 60.0
"""That many deaths of front-ends within that time are no accident: the server ends."""

Spawn = Callable[[int, socket.socket], Child]
"""Starts the front-end of an index, with its end of the socket to the scheduler."""


class TooManyCrashes(RuntimeError):
    """The server cannot go on: what ended these front-ends would end the next."""


class Frontends:
    """Knows every front-end, tells it what the server is, and replaces those that end until told to stop."""

    def __init__(self, spawn: Spawn, scheduler: Child, state: ServerState) -> None:
        """There are none before `start`. `state` is the caller's: each that starts is told what it says then."""
        self._spawn = spawn
        self._scheduler = scheduler
        self._state = state
        self._children: list[Child] = []
        self._indices = itertools.count()  # never used again: the scheduler must not mix up a dead one and its heir
        self._crashes: deque[float] = deque(maxlen=CRASHES)
        self._stopping = False

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._children))

    def __len__(self) -> int:
        return len(self._children)

    def start(self) -> None:
        """Start one more."""
        index = next(self._indices)
        scheduler_end, frontend_end = messages.socket_pair()
        with scheduler_end, frontend_end:
            self._scheduler.send(Attach(index), fd=scheduler_end.fileno())
            child = self._spawn(index, frontend_end)
        self._children.append(child)
        child.send(PhaseChange(self._state.phase, self._state.detail))
        child.send(Devices(self._state.devices))
        if self._state.ready is not None:
            child.send(self._state.ready)

    def hear(self, child: Child, message: messages.Message) -> None:
        """Act on what a front-end says."""
        child.ready = True  # FrontendReady is the first thing that it says, FrontendAlive all else

    def tell(self, message: messages.Message) -> None:
        """Tell all something."""
        for child in self._children:
            child.send(message)

    def stop(self, grace: float) -> None:
        """Tell all to finish their calls within `grace` seconds, and to end."""
        self._stopping = True
        self.tell(Stop(grace))

    def end(self, child: Child) -> None:
        """Start another in place of one whose process has ended, unless all are to end. Raises TooManyCrashes."""
        code = child.process.exitcode
        self.forget(child)
        if self._stopping:
            return
        log.error("front-end died, its calls are lost", extra={"child": child.name, "exit_code": code})
        now = time.monotonic()
        self._crashes.append(now)
        if len(self._crashes) == CRASHES and now - self._crashes[0] < CRASH_WINDOW_S:
            raise TooManyCrashes(f"{CRASHES} front-ends died within {CRASH_WINDOW_S:g} s, their own logs say why")
        self.start()

    def forget(self, child: Child) -> None:
        """End a front-end, if it has not, and release what is held of it."""
        self._children.remove(child)
        child.kill()
        child.close()
