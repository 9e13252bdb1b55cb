"""The only one to launch work on the device: a batch in, rows in the slots of its items out.

Two threads. The device thread lands pixels, stages metadata, replays or runs eagerly, gathers, and starts the copy out;
it never waits for the device but for a free ring half. The finisher waits for each batch in turn, judges its rows and
reports them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from . import kernels
from .batcher import Batch, Failure, Part
from .buffers import Landing, Packing, Ring, Staging
from .graphs import Graph, GraphManager, eager_capacity
from .models.base import PIXELS, Tower
from .streams import Event, Streams
from .types import Capacity, Dispatched, ItemPlan, Load, Outcome, Reason

FLOAT16_MAX = 65504.0
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(slots=True)
class Result:
    """What became of one part of a batch."""

    part: Part
    failure: Failure | None  # None when its rows are in the slot


@dataclass(frozen=True, slots=True)
class PathRun:
    """How one path of a batch ran."""

    path: str
    outcome: Outcome
    budget: int  # units of the captured budget, 0 when eager
    reason: Reason
    load: Load

    def told_to(self, plan: ItemPlan) -> Dispatched:
        """The same for an item or part that was in the batch."""
        units = plan.paths[self.path].units
        return Dispatched(self.path, self.outcome, self.budget, units, self.load.items, self.load.units)


@dataclass(slots=True)
class Finished:
    """A batch that is done: what became of its parts, and where the time went."""

    results: list[Result]
    runs: list[PathRun]
    taken_at: float  # time.monotonic()
    execute_s: float
    copy_s: float


@dataclass(slots=True)
class _Launched:
    """A batch on the device. Keeps alive what its kernels and copies use."""

    batch: Batch
    runs: list[PathRun]
    taken_at: float
    turn: int
    began: Event
    computed: Event
    copied: Event
    peaks: torch.Tensor  # float32 [tokens] on the host: the largest magnitude of each row, NaN where one is in it
    kept: list[torch.Tensor] = field(default_factory=list)


class Dispatcher:
    """Runs batches. `land` and `run` belong to the device thread; `on_finished` is called from the finisher."""

    def __init__(
        self,
        tower: Tower,
        graphs: GraphManager,
        slots: torch.Tensor,
        *,
        capacities: Mapping[str, Sequence[Capacity]],
        use_graphs: bool,
        on_computed: Callable[[], None],
        on_finished: Callable[[Finished], None],
        video_graphs: bool = True,
    ) -> None:
        """`slots` is the shared arena as a uint8 tensor, pinned where there is a GPU.

        `capacities` size landing blocks and ring. `on_computed` is called when the device could take another batch.
        Without `video_graphs` a batch with a video in it runs eagerly.
        """
        self._tower = tower
        self._graphs = graphs
        self._use_graphs, self._video_graphs = use_graphs, video_graphs
        self._slots = slots
        self._streams = Streams(tower.device)
        self._on_computed, self._on_finished = on_computed, on_finished
        specs = tower.planner.paths
        rows = sum(
            (specs[path].tokens_per_unit + specs[path].margin_per_unit) * max((c.units for c in planned), default=0)
            for path, planned in capacities.items()
        )
        # Pixels of all paths land together, whatever path a batch fills.
        pixel_bytes = sum(
            max((tower.buffers(path, c)[PIXELS].nbytes for c in planned), default=0)
            for path, planned in capacities.items()
        )
        self._landings = [Landing(pixel_bytes, tower.device) for _ in range(2)]
        self._staging = [
            {path: Staging(graphs.meta_bytes, tower.device) for path in tower.planner.paths} for _ in range(2)
        ]
        self._indices = [Staging(4 * rows, tower.device) for _ in range(2)]
        self._ring = Ring(rows, tower.planner.layout.width, tower.dtype, tower.device)
        self._ring_free = [threading.Semaphore(1), threading.Semaphore(1)]
        self._turn = 0
        self._launched: queue.SimpleQueue[_Launched | None] = queue.SimpleQueue()

    # --- device thread

    def land(self, part: Part) -> int:
        """Start the copy of a part's pixels to the device; returns where they begin in the landing block."""
        start = part.item.slot.pixels + part.pixels
        with torch.inference_mode(), self._streams.copy_in():
            return self._landings[self._turn].add(self._slots[start : start + part.plan.pixel_bytes])

    def run(self, batch: Batch) -> None:
        """Launch one batch; one that has lost all its parts is over at once.

        After an exception nothing of it will finish: run it again, or `discard` it.
        """
        if not batch.parts:
            self.discard()
            self._on_computed()
            return
        turn = self._turn
        self._ring_free[turn].acquire()
        try:
            launched = self._launch(batch, turn, time.monotonic())
        except BaseException:
            self._ring_free[turn].release()
            raise
        self._launched.put(launched)
        self._turn = 1 - turn
        self._landings[self._turn].open()

    def discard(self) -> None:
        """Forget the pixels of a batch that does not run; nothing on the device reads them."""
        self._landings[self._turn].open()

    def _launch(self, batch: Batch, turn: int, taken_at: float) -> _Launched:
        streams = self._streams
        with streams.copy_in():
            began = streams.record()
        runs, lines, kept = [], {}, []
        with torch.inference_mode():
            for path in self._tower.planner.paths:
                load = batch.load(path)
                if load.units:
                    run, lines[path], block = self._dispatch(path, batch, load, turn)
                    runs.append(run)
                    kept += [lines[path], block]
            rows, peaks = self._gather(batch, lines, turn)
            with streams.compute():
                computed = streams.record()
            with streams.copy_out():
                streams.wait(computed)
                kept += self._copy_out(batch, rows)
                host_peaks = torch.empty(peaks.shape, dtype=torch.float32, pin_memory=peaks.is_cuda)
                host_peaks.copy_(peaks, non_blocking=True)
                copied = streams.record()
        return _Launched(batch, runs, taken_at, turn, began, computed, copied, host_peaks, [rows, peaks, *kept])

    def _dispatch(self, path: str, batch: Batch, load: Load, turn: int) -> tuple[PathRun, torch.Tensor, torch.Tensor]:
        """Run one path: the fork of the whole product. Returns how, its output lines, and the block it read."""
        tower = self._tower
        allowed = self._use_graphs and (self._video_graphs or all(plan.kind != "video" for plan in batch.plans))
        graph = self._graphs.choose(path, load) if allowed else Reason.DISABLED
        if isinstance(graph, Graph):
            self._stage(path, batch, graph.packing, self._graphs.arena, turn)
            with self._streams.compute():
                graph.replay()
            run = PathRun(path, Outcome.HIT, graph.capacity.units, Reason.FITS, load)
            return run, graph.output, self._graphs.arena
        capacity = eager_capacity(tower.planner.paths[path], load)
        packing = Packing.of(tower.buffers(path, capacity))
        with self._streams.compute():
            block = torch.empty(packing.size, dtype=torch.uint8, device=tower.device)
        self._stage(path, batch, packing, block, turn)
        with self._streams.compute():
            lines = tower.forward(path, packing.tensors(block), capacity)
        return PathRun(path, Outcome.MISS, 0, graph, load), lines, block

    def _stage(self, path: str, batch: Batch, packing: Packing, block: torch.Tensor, turn: int) -> None:
        """Fill metadata, send it, and move it and the pixels from where they landed into the static buffers."""
        streams, staging, landing = self._streams, self._staging[turn][path], self._landings[turn]
        staging.fit(packing.meta_bytes)
        self._tower.fill(path, batch.plans, packing.metadata(staging.host.numpy()))
        with streams.copy_in():
            metadata = staging.send(packing.meta_bytes)
            arrived = streams.record()
        with streams.compute():
            streams.wait(arrived)
            block[: packing.meta_bytes].copy_(metadata)
            pixels = block[packing.meta_bytes :]
            for start, end, to in _runs(batch.parts, path):
                pixels[to : to + end - start].copy_(landing.block[start:end])

    def _gather(self, batch: Batch, lines: Mapping[str, torch.Tensor], turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of all items in order, [tokens, width], and the peak of each, on the compute stream."""
        streams, tower = self._streams, self._tower
        counts = {path: lines[path].shape[0] if path in lines else 0 for path in tower.planner.paths}
        index = tower.gather_index(batch.plans, counts)
        staging = self._indices[turn]
        staging.fit(index.nbytes)
        staging.host[: index.nbytes].numpy()[...] = index.view(np.uint8)
        with streams.copy_in():
            device_index = staging.send(index.nbytes).view(torch.int32)
            arrived = streams.record()
        with streams.compute():
            streams.wait(arrived)
            sources = [*lines.values(), *([tower.constant_rows] if tower.constant_rows is not None else [])]
            source = sources[0] if len(sources) == 1 else torch.cat(sources)
            rows = self._ring.half(turn, len(index))
            return rows, kernels.gather(source, device_index, rows)

    def _copy_out(self, batch: Batch, rows: torch.Tensor) -> list[torch.Tensor]:
        """Copy each part's rows into its slot in its dtype, on the current stream; returns what must stay alive."""
        kept, start = [], 0
        for part in batch.parts:
            mine = rows[start : start + part.plan.tokens].to(DTYPES[part.item.dtype])
            at = part.item.slot.rows + part.first_row * mine.shape[1] * mine.itemsize
            self._slots[at : at + mine.nbytes].view(mine.dtype).view(mine.shape).copy_(mine, non_blocking=True)
            kept.append(mine)
            start += part.plan.tokens
        return kept

    # --- finisher

    def finish_forever(self) -> None:
        """The finisher's life: report each launched batch when it is done. Returns after `stop`."""
        while (launched := self._launched.get()) is not None:
            launched.computed.synchronize()
            self._on_computed()
            launched.copied.synchronize()
            finished = self._judge(launched)
            self._ring_free[launched.turn].release()
            self._on_finished(finished)

    def stop(self) -> None:
        """Let the finisher end behind the last launched batch."""
        self._launched.put(None)

    def _judge(self, launched: _Launched) -> Finished:
        peaks, results, start = launched.peaks.numpy(), [], 0
        for part in launched.batch.parts:
            mine = peaks[start : start + part.plan.tokens]
            start += part.plan.tokens
            results.append(Result(part, _judgement(mine, part.item.dtype)))
        streams = self._streams
        return Finished(
            results,
            launched.runs,
            launched.taken_at,
            execute_s=streams.between(launched.began, launched.computed),
            copy_s=streams.between(launched.computed, launched.copied),
        )


def _judgement(peaks: np.ndarray, dtype: str) -> Failure | None:
    if not np.isfinite(peaks).all():
        return Failure("NON_FINITE_OUTPUT", "the tower returned NaN or infinity for this item; no rows are sent")
    if dtype == "float16" and peaks.max(initial=0.0) > FLOAT16_MAX:
        return Failure(
            "NON_FINITE_OUTPUT",
            f"a value of {peaks.max():.0f} exceeds the float16 range of {FLOAT16_MAX:.0f}; ask for bfloat16 or float32",
        )
    return None


def _runs(parts: Sequence[Part], path: str) -> list[tuple[int, int, int]]:
    """Where a path's pixels lie in the landing block and go in the buffer: (start, end, to), neighbours joined.

    One run for a path that has all pixels of all parts; gaps are parts that were dropped, or pixels of other paths.
    """
    runs: list[tuple[int, int, int]] = []
    to = 0
    for part in parts:
        start = part.landed_at
        for name, plan in part.plan.paths.items():
            if name == path and plan.pixel_bytes:
                if runs and runs[-1][1] == start and runs[-1][2] + start - runs[-1][0] == to:
                    runs[-1] = (runs[-1][0], start + plan.pixel_bytes, runs[-1][2])
                else:
                    runs.append((start, start + plan.pixel_bytes, to))
                to += plan.pixel_bytes
            start += plan.pixel_bytes
    return runs
