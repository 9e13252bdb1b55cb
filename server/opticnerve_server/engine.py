"""The engine process: one device, the only one to launch work.

Three threads: the main thread is the device thread (`batcher.py`, `dispatcher.py`), the receiver reads what front-ends
and supervisor send and grants slots (`ledger.py`), the finisher reports batches that are done. A thread that dies takes
the process with it, and the supervisor the server.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

import torch

from . import __version__, metrics
from .batcher import Batch, Batcher, Part
from .config import Config, parse_token_budgets
from .dispatcher import Dispatcher, Finished
from .graphs import GraphManager, GraphsFailed, plan_capacities
from .hits import Counts
from .ledger import Ledger
from .media import CONTRACT
from .messages import EngineReady, Failed, PathState, PhaseChange, Release, Reserve, Rows, Stop, Submit
from .models import registry
from .models.base import Tower
from .peers import Peers
from .selftest import self_test
from .slots import Arena
from .types import Capacity, Phase

log = logging.getLogger(__name__)

EXIT_RUNTIME, EXIT_CONFIG, EXIT_GPU_FAULT = 1, 2, 3


def main(config: Config, control: socket.socket, arena_fd: int) -> None:
    """Load, capture, serve until told to stop. Ends the process with an exit code where it cannot go on."""
    # A thread waits for the interpreter lock at most this long; the default of 5 ms is a batch's worth.
    sys.setswitchinterval(0.0002)
    try:
        Engine(config, control, arena_fd).run()
    except (ValueError, GraphsFailed) as error:
        log.error("cannot start", extra={"error": str(error)})
        sys.exit(EXIT_RUNTIME if isinstance(error, GraphsFailed) else EXIT_CONFIG)


class Engine:
    """The parts of the process and their life."""

    def __init__(self, config: Config, control: socket.socket, arena_fd: int) -> None:
        self.config = config
        self.arena = Arena(arena_fd, config.max_queue_bytes)
        self.ledger = Ledger(
            max_items=config.max_queue_items, max_tokens=config.max_queue_tokens, max_bytes=config.max_queue_bytes
        )
        self.peers = Peers(control)
        self.batcher: Batcher | None = None
        self.stopping = threading.Event()

    def run(self) -> None:
        """The life of the process, on its main thread."""
        _thread(self._receive_forever, "receiver")
        self.peers.tell_supervisor(PhaseChange(Phase.LOADING))
        with torch.inference_mode():
            tower, ready = self._prepare()
        dispatcher = self._dispatcher(tower)
        self.peers.tell_supervisor(ready)
        self._serve(dispatcher)

    def _prepare(self) -> tuple[Tower, EngineReady]:
        """Load weights, lay out memory, capture, self-test. Raises ValueError or GraphsFailed."""
        config = self.config
        source = registry.open_model(config.model, config.load_format)
        planner = registry.build_planner(source)
        self.video_graphs = not source.prunes_videos
        if source.prunes_videos:
            log.warning("video graphs off", extra={"reason": "video_pruning_rate is set; nothing is pruned"})
        loaded = registry.build_tower(
            source,
            planner,
            load_format=config.load_format,
            device=config.device,
            dtype=config.dtype,
            attention_backend=config.attention_backend,
        )
        device, dtype = loaded.tower.device, str(loaded.tower.dtype).removeprefix("torch.")
        if device.type == "cpu":
            os.nice(10)  # probes, and the event loops of front-ends on the same cores, come first
        self.capacities = plan_capacities(
            planner.paths,
            explicit=parse_token_budgets(config.token_budgets),
            cap=config.token_cap(device.type),
            max_items=config.max_items_per_batch,
            launches_by_segments=loaded.launches_by_segments,
        )
        self.graphs = GraphManager(loaded.tower, self.capacities)
        if config.graphs:
            self._capture()
        fingerprint = _digest(
            loaded.weights_digest,
            source.processor,
            source.video_processor,
            CONTRACT,
            config.alpha_background,
            dtype,
            planner.layout,
        )
        self._publish(source.name, fingerprint, dtype, loaded.attention_backend)
        return loaded.tower, EngineReady(
            fingerprint=fingerprint,
            dtype=dtype,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            attention_backend=loaded.attention_backend,
            paths=[
                PathState(name, state.budgets, len(state.graphs), state.memory_bytes, state.capture_s)
                for name, state in self.graphs.paths.items()
            ],
            reasons=loaded.reasons,
            model=source.name,
            architecture=planner.architecture,
            layout=planner.layout,
            modalities=planner.modalities,
        )

    def _capture(self) -> None:
        total = sum(len(capacities) for capacities in self.capacities.values())
        self.peers.tell_supervisor(PhaseChange(Phase.CAPTURING, f"0 of {total} graphs"))
        estimate, limit = self.graphs.estimate(), self.config.graph_memory_bytes
        log.info("graph memory estimated", extra={"mib": estimate >> 20, "limit_bytes": limit})
        if limit is not None and estimate > limit:
            raise ValueError(
                f"graphs would take about {estimate} bytes, over graph_memory_bytes = {limit}: lower "
                "--max-token-budget, raise the limit, or run with --no-graphs"
            )
        started = time.perf_counter()

        def progress(path: str, capacity: Capacity, done: int, total: int) -> None:
            log.info(
                "graph captured",
                extra={
                    "path": path,
                    "budget": capacity.units,
                    "segments": capacity.segments,
                    "longest": capacity.longest,
                    "done": f"{done}/{total}",
                    "s": round(time.perf_counter() - started, 2),
                },
            )
            self.peers.tell_supervisor(PhaseChange(Phase.CAPTURING, f"{done} of {total} graphs"))

        self.graphs.capture(progress, on_failure=self.config.on_capture_failure)
        captured = time.perf_counter()
        self_test(self.graphs, lambda path, capacity: None)
        log.info(
            "graphs ready",
            extra={
                "graphs": sum(len(state.graphs) for state in self.graphs.paths.values()),
                "memory_mib": sum(state.memory_bytes for state in self.graphs.paths.values()) >> 20,
                "capture_s": round(captured - started, 2),
                "selftest_s": round(time.perf_counter() - captured, 2),
            },
        )

    def _publish(self, model: str, fingerprint: str, dtype: str, backend: str) -> None:
        metrics.BUILD_INFO.labels(__version__, torch.__version__, torch.version.cuda or "none").set(1)
        metrics.CONFIG_INFO.labels(model, fingerprint, dtype, backend).set(1)
        for path, state in self.graphs.paths.items():
            metrics.GRAPHS.labels(path).set(len(state.graphs))
            metrics.GRAPH_MEMORY_BYTES.labels(path).set(state.memory_bytes)
            metrics.CAPTURE_DURATION.labels(path).set(state.capture_s)
        self._batch_tokens = metrics.batch_tokens_histogram(
            capacity.units * self.graphs.tower.planner.paths[path].tokens_per_unit
            for path, capacities in self.capacities.items()
            for capacity in capacities
        )

    def _dispatcher(self, tower: Tower) -> Dispatcher:
        captured = {path: state.capacities for path, state in self.graphs.paths.items()}
        capacities = {path: captured[path] or planned for path, planned in self.capacities.items()}
        self.batcher = Batcher(self.ledger, tower.planner, capacities)
        self.counts = Counts()
        return Dispatcher(
            tower,
            self.graphs,
            _pinned(self.arena, tower.device),
            capacities=self.capacities,
            use_graphs=self.config.graphs,
            video_graphs=self.video_graphs,
            on_computed=self.batcher.device_free,
            on_finished=self._finished,
        )

    def _serve(self, dispatcher: Dispatcher) -> None:
        """Run batches until told to stop, then those that are queued."""
        batcher = self.batcher
        assert batcher is not None
        finisher = _thread(dispatcher.finish_forever, "finisher")
        if self.stopping.is_set():
            batcher.stop()
        while (batch := batcher.take(dispatcher.land, self._idle)) is not None:
            self._idle()
            for part in batch.dropped:
                self._fail(part, "EXPIRED_IN_QUEUE", "the deadline passed while the item waited for the device")
            if batch.parts:
                self._run(dispatcher, batch)
            else:
                batcher.device_free()
        dispatcher.stop()
        finisher.join()

    def _run(self, dispatcher: Dispatcher, batch: Batch) -> None:
        """Launch a batch; what a failure means depends on whether the device still works."""
        failure: tuple[str, str, float | None]
        try:
            try:
                dispatcher.run(batch)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()  # what eager forwards of other sizes have left
                dispatcher.run(batch)
            return
        except torch.OutOfMemoryError:
            failure = "GPU_MEMORY", "the device has no memory for this batch; retry later or send less at once", 1.0
        except Exception:
            log.exception("batch failed", extra={"parts": len(batch.parts)})
            failure = "INTERNAL", "the forward failed; the server's log has the details", None
        _check_device()
        dispatcher.discard()
        for part in batch.parts:
            self._fail(part, *failure)
        assert self.batcher is not None
        self.batcher.device_free()

    def _finished(self, finished: Finished) -> None:
        """Report a batch to front-ends and metrics; on the finisher."""
        for result in finished.results:
            part, item = result.part, result.part.item
            if result.failure is not None:
                self._fail(part, *result.failure)
            elif self.ledger.from_device(item, part.plan.tokens):
                self.peers.tell_frontend(
                    item.frontend,
                    Rows(
                        item.call,
                        item.index,
                        start=part.first_row,
                        count=part.plan.tokens,
                        dispatches=[run.told_to(part.plan) for run in finished.runs if part.plan.paths[run.path].units],
                        queue_s=max(0.0, finished.taken_at - item.submitted_at),
                        execute_s=finished.execute_s,
                        copy_s=finished.copy_s,
                    ),
                )
        self.counts.add(finished)
        paths = self.graphs.tower.planner.paths
        self._batch_tokens.observe(max(run.load.units * paths[run.path].tokens_per_unit for run in finished.runs))

    def _fail(self, part: Part, reason: str, message: str, retry_after: float | None = None) -> None:
        """End the item of a part that comes back from the device, or was to go there, without rows."""
        item = part.item
        tell = self.ledger.fail(item)
        self.ledger.from_device(item, part.plan.tokens)
        if tell:
            self.peers.tell_frontend(item.frontend, Failed(item.call, item.index, reason, message, retry_after))

    def _idle(self) -> None:
        metrics.GPU_HEARTBEAT.set(time.time())

    # --- receiver

    def _receive_forever(self) -> None:
        last = 0.0
        while True:
            for peer in self.peers.wait(timeout=0.5):
                self._receive(peer)
            if time.monotonic() - last >= 1.0:
                last = time.monotonic()
                occupancy = self.ledger.occupancy()
                metrics.QUEUE_ITEMS.set(occupancy.items)
                metrics.INFLIGHT_ITEMS.set(self.ledger.on_device)
                metrics.QUEUE_TOKENS.set(occupancy.tokens)
                metrics.QUEUE_BYTES.set(occupancy.bytes)
                self.peers.tell_supervisor(occupancy)

    def _receive(self, frontend: int | None) -> None:
        """Read and act on one message of a front-end, or of the supervisor (None)."""
        message = self.peers.read(frontend)
        if message is None and frontend is None:
            log.error("supervisor is gone")
            os._exit(EXIT_RUNTIME)
        elif message is None and frontend is not None:
            self.peers.detach(frontend)
            log.warning("front-end is gone", extra={"frontend": frontend, "items": self.ledger.disconnect(frontend)})
        elif isinstance(message, Stop):
            self.stopping.set()
            if self.batcher is not None:
                self.batcher.stop()
        elif frontend is not None and isinstance(message, Reserve):
            self.peers.tell_frontend(frontend, self.ledger.reserve(frontend, message))
        elif frontend is not None and isinstance(message, Release):
            self.ledger.release(frontend, message.call, message.index)
        elif frontend is not None and isinstance(message, Submit):
            self._submit(frontend, message)

    def _submit(self, frontend: int, message: Submit) -> None:
        item = self.ledger.submit(frontend, message)
        if item is not None and self.batcher is not None:
            self.batcher.put(item)


def _thread(target: Callable[[], None], name: str) -> threading.Thread:
    """A daemon thread whose death by an exception is the death of the process."""

    def run() -> None:
        try:
            target()
        except BaseException:
            log.exception("thread died", extra={"thread": name})
            os._exit(EXIT_GPU_FAULT if _device_is_broken() else EXIT_RUNTIME)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def _device_is_broken() -> bool:
    """Whether the CUDA context is unusable: after a sticky error every call fails."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _check_device() -> None:
    if _device_is_broken():
        log.critical("the device is broken, the process ends")
        os._exit(EXIT_GPU_FAULT)


def _pinned(arena: Arena, device: torch.device) -> torch.Tensor:
    """The shared arena as a tensor, registered with CUDA where there is one, so that copies run beside kernels."""
    slots = torch.from_numpy(arena.bytes)
    if device.type == "cuda":
        error = torch.cuda.cudart().cudaHostRegister(slots.data_ptr(), slots.numel(), 0)
        if int(error):
            raise ValueError(
                f"pinning {slots.numel()} bytes of shared memory failed with CUDA error {int(error)}: lower "
                "--max-queue-bytes or raise the memory limit of the process"
            )
    return slots


def _digest(*parts: object) -> str:
    """SHA-256 of the parts as canonical JSON: the fingerprint."""
    text = json.dumps(parts, sort_keys=True, default=lambda part: [getattr(part, n) for n in part.__struct_fields__])
    return hashlib.sha256(text.encode()).hexdigest()
