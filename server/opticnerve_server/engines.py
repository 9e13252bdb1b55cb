"""The engines of a server: one child process a device, replaced when it ends. For the supervisor's thread."""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from . import messages
from .messages import AttachEngine, Device, EngineEnded, EngineReady, EngineWorks, PhaseChange
from .processes import Child
from .types import Phase

log = logging.getLogger(__name__)

DEATHS, DEATHS_WINDOW_S = 5, 600.0
"""A device whose engine dies that often within that time is left out: it costs callers more than it computes."""

Spawn = Callable[[int, socket.socket], Child]
"""Starts the engine of a device, with its end of the socket to the scheduler."""


@dataclass(slots=True, eq=False)
class Engine:
    """One engine process."""

    device: int
    child: Child
    link: socket.socket | None  # the scheduler's end of the socket between the two, until that has it
    phase: Phase = Phase.LOADING
    detail: str = ""


class TooFewEngines(RuntimeError):
    """The server cannot start, or go on. `code` is the exit code of the last engine that ended."""

    def __init__(self, reason: str, code: int | None) -> None:
        super().__init__(reason)
        self.code = code


class Engines:
    """Knows every device's engine, hands those that are ready over to the scheduler, and replaces those that end."""

    def __init__(self, devices: Sequence[int], needed: int, spawn: Spawn, scheduler: Child) -> None:
        """Start an engine on every device. `needed` of them must be there before the server has started."""
        self.ready: EngineReady | None = None  # what the first said that was
        self.has_started = False  # whether there have been as many as the server needs
        self._needed = needed
        self._spawn = spawn
        self._scheduler = scheduler
        self._names = dict.fromkeys(devices, "")
        self._restarts = dict.fromkeys(devices, 0)
        self._deaths: dict[int, deque[float]] = {device: deque(maxlen=DEATHS) for device in devices}
        self._engines: dict[int, Engine] = {}
        for device in devices:
            self._start(device)

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._engines.values()))

    @property
    def phase(self) -> tuple[Phase, str]:
        """That of the server as far as engines make it, and the progress in it, which is that of who is behind."""
        phases = {engine.phase for engine in self}
        if self.has_started:
            return (Phase.READY if Phase.READY in phases else Phase.UNHEALTHY), ""
        order = list(Phase)
        behind = min(self, key=lambda engine: order.index(engine.phase))
        return behind.phase, behind.detail

    @property
    def devices(self) -> list[Device]:
        """What callers are told; a device whose engine did not start is FAILED."""
        phases = {engine.device: engine.phase for engine in self}
        return [
            Device(device, name, phases.get(device, Phase.FAILED), self._restarts[device])
            for device, name in self._names.items()
        ]

    def hear(self, engine: Engine, message: messages.Message) -> None:
        """Act on what an engine says."""
        match message:
            case PhaseChange(phase=phase, detail=detail):
                engine.phase, engine.detail = phase, detail
            case EngineWorks(works=works) if engine.child.ready:
                engine.phase = Phase.READY if works else Phase.UNHEALTHY
            case EngineReady():
                self._admit(engine, message)

    def end(self, engine: Engine) -> None:
        """Start another in place of one whose process has ended. Raises TooFewEngines.

        One that ended while it started would do so again, as would one that has died too often: its device is left out.
        """
        code, was_ready, phase = engine.child.process.exitcode, engine.child.ready, engine.phase
        self.forget(engine)
        log.error("engine died", extra={"device": engine.device, "exit_code": code, "while": phase.value})
        if was_ready:
            if not self._serving:
                raise TooFewEngines("no engine is left", code)
            self._scheduler.send(EngineEnded(engine.device))
        if was_ready and not self._keeps_dying(engine.device):
            self._restarts[engine.device] += 1
            self._start(engine.device)
            return
        if not self.has_started and len(self._engines) < self._needed:
            reason = f"the engine of device {engine.device} ended with {code} while {phase}, its own log says why"
            raise TooFewEngines(reason, code)
        log.error("device is left out", extra={"device": engine.device})

    def forget(self, engine: Engine) -> None:
        """End an engine, if it has not, and release what is held of it."""
        del self._engines[engine.device]
        engine.child.kill()
        engine.child.close()
        if engine.link is not None:
            engine.link.close()

    def _keeps_dying(self, device: int) -> bool:
        """Whether this death is one too many."""
        deaths = self._deaths[device]
        deaths.append(time.monotonic())
        return len(deaths) == DEATHS and deaths[-1] - deaths[0] < DEATHS_WINDOW_S

    @property
    def _serving(self) -> int:
        return sum(engine.child.ready for engine in self)

    def _start(self, device: int) -> None:
        link, theirs = messages.socket_pair()
        with theirs:
            self._engines[device] = Engine(device, self._spawn(device, theirs), link)

    def _admit(self, engine: Engine, ready: EngineReady) -> None:
        """Hand an engine that is ready over to the scheduler."""
        if self.ready is not None and ready.fingerprint != self.ready.fingerprint:
            log.error("engine has another model than the server", extra={"device": engine.device})
            engine.child.kill()
            return
        self.ready = self.ready or ready
        self._names[engine.device] = ready.device
        assert engine.link is not None, "an engine is ready once"
        self._scheduler.send(AttachEngine(engine.device, ready), fd=engine.link.fileno())
        engine.link.close()
        engine.link, engine.phase, engine.child.ready = None, Phase.READY, True
        self.has_started |= self._serving >= self._needed
