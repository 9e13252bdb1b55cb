"""The engine process: one device, the only one to launch work.

Three threads: the main thread is the device thread (`batcher.py`, `dispatcher.py`), the receiver reads what front-ends
and supervisor send and grants slots (`ledger.py`), the finisher reports batches that are done. A thread that dies takes
the process with it, and the supervisor the server.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable

import msgspec
import torch

from . import __version__, metrics, tracing
from .batcher import Batcher, Failure, Part
from .config import Config
from .dispatcher import Dispatcher, Finished
from .graphs import GraphsFailed
from .hits import Counts
from .ledger import Ledger, Notice, Progress
from .loading import Loaded, load
from .media import CONTRACT
from .messages import EndLeases, EngineReady, Message, PathState, PhaseChange, Release, Reserve, Stop, Submit
from .peers import Peers
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

EXPIRED = Failure("EXPIRED_IN_QUEUE", "the deadline passed while the item waited for the device")


def main(config: Config, control: socket.socket, arena_fd: int) -> None:
    """Load, capture, serve until told to stop. Ends the process with an exit code where it cannot go on."""
    # A thread waits for the interpreter lock at most this long; the default of 5 ms is a batch's worth.
    sys.setswitchinterval(0.0002)
    try:
        Engine(config, control, arena_fd).run()
    except (ValueError, GraphsFailed, SentinelFailed) as error:
        log.error("cannot start", extra={"error": str(error)})
        sys.exit(EXIT_CONFIG if isinstance(error, ValueError) else EXIT_RUNTIME)
    except DeviceBroken:
        log.critical("the device is broken, the process ends")
        os._exit(EXIT_GPU_FAULT)


class Engine:
    """The parts of the process and their life."""

    def __init__(self, config: Config, control: socket.socket, arena_fd: int) -> None:
        self.config = config
        self.arena = Arena(arena_fd, config.arena_bytes)
        self.ledger = Ledger(
            max_items=config.max_queue_items,
            max_tokens=config.max_queue_tokens,
            max_bytes=config.max_queue_bytes,
            store_bytes=config.store_bytes,
        )
        self.peers = Peers(control)
        self._telling = threading.Lock()
        self.counts = Counts()
        self.stopping = threading.Event()
        self.batcher: Batcher | None = None  # from READY on, as is the next
        self.runner: Runner | None = None

    def run(self) -> None:
        """The life of the process, on its main thread."""
        _thread(self._receive_forever, "receiver")
        self.peers.tell_supervisor(PhaseChange(Phase.LOADING))
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
        dispatcher = self._dispatcher(loaded)
        settle()
        self.peers.tell_supervisor(ready)
        self._serve(dispatcher)

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
                PathState(name, state.budgets, len(state.graphs), state.memory_bytes, state.capture_s)
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
        self.peers.tell_supervisor(PhaseChange(Phase.CAPTURING, f"0 of {total} graphs"))
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
            self.peers.tell_supervisor(PhaseChange(Phase.CAPTURING, f"{done} of {total} graphs"))

        def tested(path: str, capacity: Capacity) -> None:
            done = next(numbers)
            self.peers.tell_supervisor(PhaseChange(Phase.CAPTURING, f"{done} of {total} graphs tested"))

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

    def _dispatcher(self, loaded: Loaded) -> Dispatcher:
        tower, graphs = loaded.tower.tower, loaded.graphs
        self._tokens_per_unit = {path: spec.tokens_per_unit for path, spec in tower.planner.paths.items()}
        self._batch_tokens = metrics.batch_tokens_histogram(
            capacity.units * self._tokens_per_unit[path]
            for path, capacities in loaded.capacities.items()
            for capacity in capacities
        )
        bounds = {path: graphs.paths[path].capacities or planned for path, planned in loaded.capacities.items()}
        self.batcher = Batcher(self.ledger, tower.planner, bounds)
        largest = {path: max(capacities, key=lambda c: c.units) for path, capacities in bounds.items() if capacities}
        self.ledger.batches_hold(
            tokens=sum(largest[path].units * self._tokens_per_unit[path] for path in largest),
            items=max(capacity.items for capacity in largest.values()),
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
            free=self.batcher.device_free,
            changed=self._tell_load,
        )
        return dispatcher

    def _serve(self, dispatcher: Dispatcher) -> None:
        """Run batches until told to stop, then those that are queued. Raises DeviceBroken."""
        batcher, runner = self.batcher, self.runner
        assert batcher is not None
        assert runner is not None
        finisher = _thread(dispatcher.finish_forever, "finisher")
        if self.stopping.is_set():
            batcher.stop()
        while (batch := batcher.take(runner.land, runner.idle)) is not None:
            for part in batch.dropped:
                self._fail(part, part.failure or EXPIRED)
            runner.run(batch)
        dispatcher.stop()
        finisher.join()
        self.counts.tell()

    def _computed(self) -> None:
        assert self.runner is not None, "nothing is launched but by it"
        self.runner.computed()

    def _finished(self, finished: Finished) -> None:
        """Report a batch to front-ends and metrics; on the finisher."""
        for result in finished.results:
            part = result.part
            if result.failure is not None:
                self._fail(part, result.failure)
                continue
            progress = Progress(
                start=part.first_row,
                count=part.plan.tokens,
                dispatches=[run.told_to(part.plan) for run in finished.runs if part.plan.paths[run.path].units],
                queue_s=max(0.0, finished.taken_at - part.item.submitted_at),
                execute_s=finished.execute_s,
                copy_s=finished.copy_s,
            )
            with self._telling:
                self._tell(self.ledger.from_device(part.item, progress))
        self.ledger.computed(finished.execute_s)
        self.counts.add(finished)
        tracing.batch(finished)
        self._batch_tokens.observe(max(run.load.units * self._tokens_per_unit[run.path] for run in finished.runs))

    def _fail(self, part: Part, failure: Failure) -> None:
        """End the item of a part that comes back from the device, or was to go there, without rows."""
        with self._telling:
            self._tell(self.ledger.fail(part.item, *failure))

    def _tell(self, notices: Iterable[Notice]) -> None:
        """Tell the front-ends. `_telling` is held since the ledger was asked: they hear of events in their order."""
        for frontend, message in notices:
            self.peers.tell_frontend(frontend, message)

    # --- receiver

    def _receive_forever(self) -> None:
        last = 0.0
        while True:
            for peer in self.peers.wait(timeout=0.5):
                self._receive(peer)
            if time.monotonic() - last >= 1.0:
                last = time.monotonic()
                self._report()

    def _report(self) -> None:
        """What is due every second: gauges, the line of hits, and the sign of life, unless the device gives none."""
        occupancy = self.ledger.occupancy()
        metrics.QUEUE_ITEMS.set(occupancy.items)
        metrics.INFLIGHT_ITEMS.set(self.ledger.on_device)
        metrics.QUEUE_TOKENS.set(occupancy.tokens)
        metrics.QUEUE_BYTES.set(occupancy.bytes)
        store = self.ledger.store
        metrics.STORE_ITEMS.set(store.items)
        metrics.STORE_BYTES.set(store.used_bytes)
        metrics.STORE_LEASED_BYTES.set(store.leased_bytes)
        self.counts.tell_if_due()
        stuck = 0.0 if self.runner is None else time.monotonic() - self.runner.busy_since
        if stuck < STUCK_S:
            self._tell_load()
        else:
            log.error("a batch does not end", extra={"seconds": round(stuck)})

    def _tell_load(self) -> None:
        """Tell the supervisor how much is inside, and whether the device works. Any thread."""
        works = self.runner is None or self.runner.works
        self.peers.tell_supervisor(msgspec.structs.replace(self.ledger.occupancy(), works=works))

    def _receive(self, frontend: int | None) -> None:
        """Read and act on one message of a front-end, or of the supervisor (None)."""
        message = self.peers.read(frontend)
        if message is None and frontend is None:
            log.error("supervisor is gone")
            os._exit(EXIT_RUNTIME)
        elif message is None and frontend is not None:
            self.peers.detach(frontend)
            with self._telling:
                lost, notices = self.ledger.disconnect(frontend)
                self._tell(notices)
            log.log(
                logging.WARNING if lost else logging.INFO,
                "front-end is gone",
                extra={"frontend": frontend, "items": lost},
            )
        elif isinstance(message, Stop):
            self.stopping.set()
            if self.batcher is not None:
                self.batcher.stop()
        elif frontend is not None and message is not None:
            with self._telling:
                self._act(frontend, message)

    def _act(self, frontend: int, message: Message) -> None:
        """Enter what a front-end says into the ledger."""
        ledger = self.ledger
        match message:
            case Reserve():
                self._tell(ledger.reserve(frontend, message))
            case Submit():
                item, notices = ledger.submit(frontend, message)
                self._tell(notices)
                if item is not None:
                    assert self.batcher is not None, "front-ends submit from READY on"
                    self.batcher.put(item)
            case Release():
                self._tell(ledger.release(frontend, message.call, message.index, message.served))
            case EndLeases():
                self._tell(ledger.end_leases(frontend, message.call, message.names))


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
