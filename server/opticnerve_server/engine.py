"""The engine process: one device, the only one to launch work on it.

Three threads: the main thread is the device thread, which does what the scheduler says (`parts.py`, `runner.py`,
`dispatcher.py`), the finisher reports batches that are done, the heart beats. A thread that dies takes the process with
it; the supervisor starts another.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable

import torch
from msgspec.structs import replace

from . import __version__, metrics, tracing
from .config import Config
from .dispatcher import SWITCH_INTERVAL_S, Dispatcher, Finished
from .graphs import GraphsFailed
from .hits import Counts
from .loading import Loaded, load
from .media import CONTRACT
from .messages import (
    MAX_MESSAGE_BYTES,
    Computed,
    Done,
    EngineReady,
    EngineWorks,
    Land,
    Message,
    OfEngine,
    PartDone,
    PartFailed,
    PathState,
    PhaseChange,
    Run,
    decode,
    encode,
)
from .parts import Failure, Intake, Part
from .processes import settle
from .runner import DeviceBroken, Runner, device_is_broken
from .selftest import self_test
from .sentinel import Sentinel, SentinelFailed
from .slots import Arena
from .types import Capacity, Phase

log = logging.getLogger(__name__)

EXIT_RUNTIME, EXIT_CONFIG, EXIT_GPU_FAULT = 1, 2, 3

STUCK_S = 120.0
"""A batch that the device has not computed after so long never will be: the engine stops giving signs of life."""

BEAT_S = 1.0
"""Between two signs of life."""

IDLE_S = 1.0
"""Time without work after which the device is looked after."""


def main(config: Config, device: int, control: socket.socket, link: socket.socket, arena_fd: int) -> None:
    """Load, capture, run what comes over `link` until it ends. Ends the process, with an exit code, if it cannot go on.

    `device` is its number among those of the server; the process sees no other GPU.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        Engine(config, device, control, link, arena_fd).run()
    except (ValueError, GraphsFailed, SentinelFailed) as error:
        log.error("cannot start", extra={"error": str(error)})
        sys.exit(EXIT_CONFIG if isinstance(error, ValueError) else EXIT_RUNTIME)
    except DeviceBroken:
        log.critical("the device is broken, the process ends")
        os._exit(EXIT_GPU_FAULT)


class Engine:
    """The parts of the process and their life."""

    def __init__(self, config: Config, device: int, control: socket.socket, link: socket.socket, arena_fd: int) -> None:
        self.config = config
        self.arena = Arena(arena_fd, config.arena_bytes)
        self.counts = Counts()
        self.runner: Runner | None = None  # from READY on
        self._device = device
        self._control, self._link = control, link

    def run(self) -> None:
        """The life of the process, on its main thread."""
        self._tell_supervisor(PhaseChange(Phase.LOADING))
        loaded = load(self.config)
        device = loaded.tower.tower.device
        if device.type == "cpu":
            os.nice(10)  # probes, and the event loops of front-ends on the same cores, come first
        if loaded.source.prunes_videos:
            log.warning("video graphs off", extra={"reason": "video_pruning_rate is set; nothing is pruned"})
        if self.config.graphs:
            self._capture(loaded)
        ready = self._ready(loaded)
        self._publish(loaded, ready)
        dispatcher, runner = self._parts(loaded)
        settle()
        self._tell_supervisor(ready)
        self._serve(dispatcher, runner)

    def _ready(self, loaded: Loaded) -> EngineReady:
        tower, source = loaded.tower.tower, loaded.source
        dtype = str(tower.dtype).removeprefix("torch.")
        fingerprint = _digest(
            loaded.tower.weights_digest,
            source.processor,
            source.video_processor,
            CONTRACT,
            self.config.alpha_background,
            dtype,
            tower.planner.layout,
        )
        return EngineReady(
            fingerprint=fingerprint,
            dtype=dtype,
            device=torch.cuda.get_device_name(tower.device) if tower.device.type == "cuda" else "cpu",
            attention_backend=loaded.tower.attention_backend,
            paths=[
                PathState(
                    name,
                    state.budgets,
                    len(state.graphs),
                    state.memory_bytes,
                    state.capture_s,
                    tower.planner.paths[name].rows_per_unit,
                    tower.planner.paths[name].tokens_per_unit,
                    state.capacities or loaded.capacities[name],
                )
                for name, state in loaded.graphs.paths.items()
            ],
            reasons=loaded.tower.reasons,
            model=source.name,
            architecture=source.architecture,
            layout=tower.planner.layout,
            modalities=tower.planner.modalities,
        )

    def _capture(self, loaded: Loaded) -> None:
        """Capture and test every graph. Raises ConfigError or GraphsFailed."""
        graphs, total = loaded.graphs, sum(map(len, loaded.capacities.values()))
        self._tell_supervisor(PhaseChange(Phase.CAPTURING, f"0 of {total} graphs"))
        limit = self.config.graph_memory_bytes
        estimate = loaded.estimate(limit)
        log.info("graph memory estimated", extra={"mib": estimate >> 20, "limit_bytes": limit})
        started = last = time.perf_counter()

        def progress(path: str, capacity: Capacity, done: int, total: int) -> None:
            nonlocal last
            since, last = last, time.perf_counter()
            log.info(
                "graph captured",
                extra={
                    "path": path,
                    "budget": capacity.units,
                    "segments": capacity.segments,
                    "longest": capacity.longest,
                    "done": f"{done}/{total}",
                    "ms": round(1000 * (last - since), 1),
                    "reserved_mib": torch.cuda.memory_reserved() >> 20,
                },
            )
            self._tell_supervisor(PhaseChange(Phase.CAPTURING, f"{done} of {total} graphs"))

        def tested(path: str, capacity: Capacity) -> None:
            done = next(numbers)
            self._tell_supervisor(PhaseChange(Phase.CAPTURING, f"{done} of {total} graphs tested"))

        numbers = itertools.count(1)
        with torch.inference_mode():
            graphs.capture(progress, on_failure=self.config.on_capture_failure)
            captured = time.perf_counter()
            self_test(graphs, tested)
        log.info(
            "graphs ready",
            extra={
                "graphs": sum(len(state.graphs) for state in graphs.paths.values()),
                "memory_mib": sum(state.memory_bytes for state in graphs.paths.values()) >> 20,
                "capture_s": round(captured - started, 2),
                "selftest_s": round(time.perf_counter() - captured, 2),
            },
        )

    def _publish(self, loaded: Loaded, ready: EngineReady) -> None:
        metrics.BUILD_INFO.labels(__version__, torch.__version__, torch.version.cuda or "none").set(1)
        metrics.CONFIG_INFO.labels(ready.model, ready.fingerprint, ready.dtype, ready.attention_backend).set(1)
        for path, state in loaded.graphs.paths.items():
            metrics.GRAPHS.labels(path).set(len(state.graphs))
            metrics.GRAPH_MEMORY_BYTES.labels(path).set(state.memory_bytes)
            metrics.CAPTURE_DURATION.labels(path).set(state.capture_s)

    def _parts(self, loaded: Loaded) -> tuple[Dispatcher, Runner]:
        tower, graphs = loaded.tower.tower, loaded.graphs
        self._tokens_per_unit = {path: spec.tokens_per_unit for path, spec in tower.planner.paths.items()}
        self._batch_tokens = metrics.batch_tokens_histogram(
            capacity.units * self._tokens_per_unit[path]
            for path, capacities in loaded.capacities.items()
            for capacity in capacities
        )
        dispatcher = Dispatcher(
            tower,
            graphs,
            _pinned(self.arena, tower.device),
            capacities=loaded.capacities,
            use_graphs=self.config.graphs,
            video_graphs=not loaded.source.prunes_videos,
            on_computed=self._computed,
            on_finished=self._finished,
        )
        self.runner = Runner(
            dispatcher,
            Sentinel(graphs, loaded.capacities),
            fail=self._fail,
            free=lambda: self._tell(Computed()),
            changed=self._changed,
        )
        return dispatcher, self.runner

    def _computed(self) -> None:
        assert self.runner is not None, "nothing is launched but by it"
        self.runner.computed()

    def _changed(self) -> None:
        """The device computes again, or no longer."""
        assert self.runner is not None
        news = EngineWorks(self.runner.works)
        self._tell(news)
        self._tell_supervisor(news)

    def _finished(self, finished: Finished) -> None:
        """Report a batch to scheduler and metrics; on the finisher."""
        done = []
        for result in finished.results:
            part = result.part
            if result.failure is not None:
                self._fail(part, result.failure)
                continue
            runs = [run.told_to(part.plan) for run in finished.runs if part.plan.paths[run.path].units]
            done.append(PartDone(part.work.number, [replace(run, device=self._device) for run in runs]))
        self._tell(Done(done, finished.began_at, finished.execute_s, finished.copy_s))
        self.counts.add(finished)
        tracing.batch(finished)
        self._batch_tokens.observe(max(run.load.units * self._tokens_per_unit[run.path] for run in finished.runs))

    def _fail(self, part: Part, failure: Failure) -> None:
        """A part ends without rows."""
        self._tell(PartFailed(part.work.number, *failure))

    def _tell(self, message: OfEngine) -> None:
        """Tell the scheduler; any thread. Once it is gone, the next read ends this process."""
        try:
            self._link.sendall(encode(message))
        except (BrokenPipeError, ConnectionResetError):
            log.info("scheduler is gone", extra={"message_type": type(message).__name__})

    def _tell_supervisor(self, message: Message) -> None:
        self._control.sendall(encode(message))

    # --- life

    def _serve(self, dispatcher: Dispatcher, runner: Runner) -> None:
        """Do what the scheduler says until it is gone. Raises DeviceBroken."""
        finisher = _thread(dispatcher.finish_forever, "finisher")
        _thread(lambda: self._beat_forever(runner), "heart")
        intake = Intake(runner.land, runner.run, self._fail)
        while True:
            if not select.select([self._link], [], [], IDLE_S)[0]:
                runner.idle()
            elif (message := self._heard()) is not None:
                intake.handle(message)
            else:
                break
        dispatcher.stop()
        finisher.join()
        self.counts.tell()

    def _heard(self) -> Land | Run | None:
        """What the scheduler says; None once it is gone."""
        try:
            data = self._link.recv(MAX_MESSAGE_BYTES)
        except ConnectionResetError:
            data = b""
        message = decode(data) if data else None
        assert message is None or isinstance(message, Land | Run), "nothing else is for an engine"
        return message

    def _beat_forever(self, runner: Runner) -> None:
        while True:
            self._beat(runner)
            time.sleep(BEAT_S)

    def _beat(self, runner: Runner) -> None:
        """What is due every second: the line of hits, and the sign of life, unless the device gives none."""
        self.counts.tell_if_due()
        stuck = time.monotonic() - runner.busy_since
        if stuck < STUCK_S:
            self._tell_supervisor(EngineWorks(runner.works))
        else:
            log.error("a batch does not end", extra={"seconds": round(stuck)})


def _thread(target: Callable[[], None], name: str) -> threading.Thread:
    """A daemon thread whose death by an exception is the death of the process."""

    def run() -> None:
        try:
            target()
        except BaseException:
            try:
                log.exception("thread died", extra={"died": name})
            finally:
                os._exit(EXIT_GPU_FAULT if device_is_broken() else EXIT_RUNTIME)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def _pinned(arena: Arena, device: torch.device) -> torch.Tensor:
    """The shared arena as a tensor, registered with CUDA where there is one, so that copies run beside kernels."""
    slots = torch.from_numpy(arena.bytes)
    if device.type == "cuda":
        error = torch.cuda.cudart().cudaHostRegister(slots.data_ptr(), slots.numel(), 0)
        if int(error):
            raise ValueError(
                f"pinning {slots.numel()} bytes of shared memory failed with CUDA error {int(error)}: lower "
                "--max-queue-bytes or --store-bytes, or raise the memory limit of the process"
            )
    return slots


def _digest(*parts: object) -> str:
    """SHA-256 of the parts as canonical JSON: the fingerprint."""
    text = json.dumps(parts, sort_keys=True, default=lambda part: [getattr(part, n) for n in part.__struct_fields__])
    return hashlib.sha256(text.encode()).hexdigest()
