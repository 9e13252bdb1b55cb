"""The supervisor: the only file that knows the order in which a server starts, lives and ends.

    bind all ports, NOT_SERVING -> shared memory -> scheduler, engines, front-ends
    LOADING -> CAPTURING -> READY, SERVING, once as many engines are ready as --min-engines says
    no device computes -> UNHEALTHY, NOT_SERVING -> one does again -> READY, SERVING
    SIGTERM -> DRAINING, NOT_SERVING -> drain delay -> front-ends finish their calls -> scheduler -> engines -> exit 0

Exit codes: 0 a stop that was asked for, 2 a configuration or model that cannot be served, 1 any other failure, 3 no
engine is left that serves. An engine that dies, or says nothing any more, is replaced while others serve; so is a
front-end, whose own calls alone are lost.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NoReturn

from . import messages, slots
from .companion import Companion
from .config import Config
from .credentials import CredentialFiles
from .devices import devices_of
from .engines import Engine, Engines, TooFewEngines
from .frontends import Frontends, TooManyCrashes
from .info import ServerState, server_info
from .listeners import Listeners
from .messages import Devices, Occupancy, PhaseChange, Stop
from .ports import loopback
from .processes import (
    Child,
    EngineTarget,
    FrontendTarget,
    SchedulerTarget,
    inherited_fd,
    run_engine,
    run_frontend,
    run_scheduler,
    run_sglang,
)
from .settings import ConfigError
from .signals import StopRequests
from .types import Phase

log = logging.getLogger(__name__)

FAREWELL_S = 2.0
"""After the last engine has died: time for the front-ends to answer their callers."""

EXIT_S = 5.0
"""Time for children without work to exit before they are killed."""

SILENCE_S = 60.0
"""A scheduler that has sent no Occupancy, due every second, for that long is not alive any more. An engine that has
sent no EngineWorks, due likewise, is killed."""

FRONTEND_SILENCE_S = 20.0
"""A front-end that has sent no FrontendAlive, due every second, for that long is stopped, or its loop is stuck: its
callers wait in vain, and so do new ones. It is killed, which tells them, and replaced."""

_TICK_S = 1.0
_PROBE_S = 0.05


class _End(Exception):
    """The server ends with this exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Supervisor:
    """One server. `run` is called once, on the main thread, whose SIGTERM and SIGINT it takes.

    Raises ConfigError for secret files that cannot be used.
    """

    def __init__(
        self,
        config: Config,
        decode_contract: dict[str, str],
        engine_target: EngineTarget = run_engine,
        frontend_target: FrontendTarget = run_frontend,
        scheduler_target: SchedulerTarget = run_scheduler,
    ) -> None:
        self._config = config
        self._scheduler_target = scheduler_target
        self._engine_target = engine_target
        self._frontend_target = frontend_target
        self._credentials = CredentialFiles(config)
        self._state = ServerState(config=config, instance_id=uuid.uuid4().hex, decode_contract=decode_contract)
        self._companions: list[Companion] = []
        self._listening = self._scheduler_ended = False
        self._started, self._alive = False, True
        self._born = self._phase_since = self._heartbeat = time.monotonic()

    def run(self) -> int:
        """Serve until told to stop; the exit code."""
        with ExitStack() as self._held:  # what must be given back, in reverse order, however it ends
            try:
                self._stops = self._held.enter_context(StopRequests())
                self._bind()
                self._spawn()
                self._start()
                self._serve()
                self._drain()
            except _End as end:
                return end.code
        return 0

    # --- start

    def _bind(self) -> None:
        try:
            folder = self._held.enter_context(tempfile.TemporaryDirectory(prefix="opticnerve-metrics-"))
        except OSError as error:
            self._fail(f"no temporary directory for the metrics: {error}; set TMPDIR to one that can be written", 2)
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        try:
            listeners = Listeners(self._config, lambda: server_info(self._state, self._state.phase))
        except ConfigError as error:
            self._fail(str(error), 2)
        self._listeners = self._held.enter_context(listeners)
        self._metrics, self._health = listeners.metrics, listeners.health
        self._metrics.enter(Phase.LOADING)

    def _spawn(self) -> None:
        config = self._config
        try:
            devices = devices_of(config)
        except ConfigError as error:
            self._fail(str(error), 2)
        needed = len(devices) if config.min_engines == "all" else config.min_engines
        if needed > len(devices):
            self._fail(f"min_engines = {needed} is over the number of devices, {len(devices)}: lower it", 2)
        self._arena_fd = slots.Arena.create(config.arena_bytes)
        self._held.callback(os.close, self._arena_fd)
        self._scheduler = Child("scheduler", self._scheduler_target, (config, Child.CONTROL))
        self._engines = Engines(devices, needed, self._spawn_engine, self._scheduler)
        self._frontends = Frontends(self._spawn_frontend, self._scheduler, self._state)
        self._held.callback(self._end_children)
        for _ in range(config.frontends):
            self._frontends.start()
        if self._listeners.sglang:
            addresses = {"listen": loopback(self._listeners.address), **self._listeners.sglang}
            self._companions.append(Companion("sglang", run_sglang, (self._config, Child.CONTROL, addresses)))

    def _spawn_engine(self, device: int, link: socket.socket) -> Child:
        arguments = (self._config, device, Child.CONTROL, link, inherited_fd(self._arena_fd))
        return Child(f"engine-{device}", self._engine_target, arguments)

    def _spawn_frontend(self, index: int, link: socket.socket) -> Child:
        arguments = (self._config, index, Child.CONTROL, link, inherited_fd(self._arena_fd))
        server = (self._listeners.address, self._state.instance_id, self._credentials.last_good())
        return Child(f"frontend-{index}", self._frontend_target, (*arguments, *server))

    def _start(self) -> None:
        """Follow the children until all are ready and the service's port answers."""
        while not (self._listening and self._engines.has_started and all(c.ready for c in self._frontends)):
            if self._stops.count:
                log.info("stopped while starting")
                raise _End(0)
            if time.monotonic() - self._born > self._config.startup_timeout:
                where = f"{self._state.phase} {self._state.detail}".strip()
                self._fail(f"not serving within startup_timeout = {self._config.startup_timeout:g} s, still {where}", 1)
            self._step(_TICK_S if self._listening else _PROBE_S)
            if not self._listening and self._listeners.service_answers():
                self._listening = True
                log.info("listening", extra={**self._listeners.addresses, "instance_id": self._state.instance_id})
        self._started = True
        self._enter(Phase.READY)
        log.info("ready", extra={"seconds": round(time.monotonic() - self._born, 1), **self._totals()})

    def _totals(self) -> dict[str, object]:
        ready = self._state.ready
        assert ready is not None
        return {
            "model": ready.model,
            "device": ready.device,
            "dtype": ready.dtype,
            "attention_backend": ready.attention_backend,
            "graphs": sum(path.graphs for path in ready.paths),
            "graph_memory_bytes": sum(path.graph_memory_bytes for path in ready.paths),
            "fingerprint": ready.fingerprint,
        }

    # --- life

    def _serve(self) -> None:
        self._heartbeat = time.monotonic()
        while not self._stops.count:
            began = time.monotonic()
            self._step(_TICK_S)
            self._end_silent(began)
            self._credentials.last_good()
            alive = time.monotonic() - self._heartbeat < SILENCE_S
            if alive is not self._alive:
                self._alive = alive
                log.log(
                    logging.INFO if alive else logging.ERROR, "scheduler answers" if alive else "scheduler is silent"
                )
                self._health.update(self._state.phase, self._started, alive)

    def _step(self, timeout: float) -> None:
        """Handle what has happened, or wait for it up to `timeout` seconds."""
        handlers: dict[Any, Callable[[], object]] = {self._stops.wakeup: self._stops.hear}
        if not self._scheduler_ended:
            self._watch(handlers, self._scheduler, self._on_scheduler, self._on_scheduler_death)
        for engine in self._engines:
            self._watch(
                handlers, engine.child, partial(self._on_engine, engine), partial(self._on_engine_death, engine)
            )
        for child in self._frontends:
            hear, end = partial(self._frontends.hear, child), partial(self._on_frontend_death, child)
            self._watch(handlers, child, hear, end)
        # What a child said last is heard before its end.
        for event in sorted(wait(list(handlers), timeout), key=lambda event: isinstance(event, int)):
            handlers[event]()
        for companion in self._companions:
            companion.look_after()
        if self._stops.count > 1:
            log.warning("stopped at once by a second signal")
            raise _End(1)

    def _watch(
        self,
        handlers: dict[Any, Callable[[], object]],
        child: Child,
        on_message: Callable[[messages.Message], None],
        on_death: Callable[[], None],
    ) -> None:
        def hear_all() -> None:
            while (message := child.receive()) is not None:
                on_message(message)

        if not child.silent:
            handlers[child.control] = hear_all
        handlers[child.process.sentinel] = on_death

    def _on_scheduler(self, message: messages.Message) -> None:
        assert isinstance(message, Occupancy), "it says nothing else"
        self._heartbeat = time.monotonic()
        self._state.occupancy = message
        self._frontends.tell(message)

    def _on_engine(self, engine: Engine, message: messages.Message) -> None:
        engines, state = self._engines, self._state
        engines.hear(engine, message)
        if state.ready is None and engines.ready is not None:
            state.ready = engines.ready
            self._frontends.tell(engines.ready)
        self._tell_devices()
        if not engines.has_started or state.phase in (Phase.READY, Phase.UNHEALTHY):
            self._enter(*engines.phase)

    def _tell_devices(self) -> None:
        """Make what has changed of the devices known to everyone."""
        devices = self._engines.devices
        if devices != self._state.devices:
            self._state.devices = devices
            self._frontends.tell(Devices(devices))
            self._metrics.show(devices)

    def _enter(self, phase: Phase, detail: str = "") -> None:
        """Make a phase, or progress in it, known to everyone."""
        state, before = self._state, self._state.phase
        if (phase, detail) == (before, state.detail):
            return
        state.phase, state.detail = phase, detail
        if phase is not before:
            now = time.monotonic()
            if before in (Phase.LOADING, Phase.CAPTURING):
                self._metrics.started(before, now - self._phase_since)
            self._phase_since = now
            self._metrics.enter(phase)
            self._health.update(phase, self._started, self._alive)
            log.info("phase", extra={"phase": phase.value, "detail": detail})
        self._frontends.tell(PhaseChange(phase, detail))

    # --- deaths

    def _on_engine_death(self, engine: Engine) -> None:
        engine.child.process.join()
        assert engine.child.process.pid is not None
        self._metrics.forget(engine.child.process.pid)
        if self._scheduler_ended:
            self._engines.forget(engine)
            return
        try:
            self._engines.end(engine)
        except TooFewEngines as error:
            if not self._engines.has_started:
                self._fail(str(error), 2 if error.code == 2 else 1)
            self._end_at_once(3)
        self._tell_devices()

    def _on_scheduler_death(self) -> None:
        self._scheduler.process.join()
        log.error("scheduler died", extra={"exit_code": self._scheduler.process.exitcode})
        self._end_at_once(1)

    def _end_at_once(self, code: int) -> NoReturn:
        """End, with a moment for front-ends to answer their callers: the scheduler's end fails every call."""
        self._scheduler_ended = True
        self._scheduler.kill()
        self._enter(Phase.FAILED)
        self._stop_frontends(FAREWELL_S)
        raise _End(code)

    def _on_frontend_death(self, child: Child) -> None:
        child.process.join()
        assert child.process.pid is not None
        self._metrics.forget(child.process.pid)
        try:
            self._frontends.end(child)
        except TooManyCrashes as error:
            self._fail(str(error), 1)

    def _end_silent(self, began: float) -> None:
        """Kill children that have been silent for too long, unless this process itself did not run since `began`."""
        now = time.monotonic()
        limits = [(child, FRONTEND_SILENCE_S) for child in self._frontends]
        limits += [(engine.child, SILENCE_S) for engine in self._engines]
        for child, limit in limits:
            if now - began > limit / 2:
                child.heard_at = now
            if now - child.heard_at > (limit if child.ready else self._config.startup_timeout):
                log.error("child is silent", extra={"child": child.name, "seconds": round(now - child.heard_at, 1)})
                child.kill()

    def _fail(self, reason: str, code: int) -> NoReturn:
        log.error("failed", extra={"reason": reason, "exit_code": code})
        raise _End(code)

    # --- end

    def _drain(self) -> None:
        """Leave the load balancers' lists first, then refuse, then let the admitted calls finish."""
        self._enter(Phase.DRAINING)
        until = time.monotonic() + self._config.drain_delay
        while (left := until - time.monotonic()) > 0:
            self._step(left)
        until = time.monotonic() + self._config.grace + EXIT_S
        for companion in self._companions:
            companion.stop(self._config.grace)
        self._stop_frontends(self._config.grace)
        for companion in self._companions:
            companion.wait(until)
        self._stop_engines()
        log.info("stopped", extra={"seconds": round(time.monotonic() - self._phase_since, 1)})

    def _stop_frontends(self, grace: float) -> None:
        """Give the front-ends `grace` seconds to finish their calls, and a moment more to exit."""
        self._frontends.stop(grace)
        until = time.monotonic() + grace + EXIT_S
        while self._frontends and (left := until - time.monotonic()) > 0:
            self._step(left)
        for child in self._frontends:
            log.warning("front-end did not end in time, its calls are lost", extra={"child": child.name})

    def _stop_engines(self) -> None:
        """The scheduler ends when told to, each engine when the scheduler is gone."""
        self._scheduler_ended = True  # from here on its end is no failure, nor is theirs
        self._scheduler.send(Stop(0.0))
        until = time.monotonic() + EXIT_S
        for child in (self._scheduler, *(engine.child for engine in self._engines if engine.child.ready)):
            if not child.wait(max(0.0, until - time.monotonic())):
                log.warning("child did not end in time", extra={"child": child.name})

    def _end_children(self) -> None:
        for companion in self._companions:
            companion.close()
        for child in self._frontends:
            self._frontends.forget(child)
        self._scheduler.kill()
        self._scheduler.close()
        for engine in self._engines:
            self._engines.forget(engine)
