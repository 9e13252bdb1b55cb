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
from dataclasses import dataclass

import numpy as np
import torch

from . import kernels
from .buffers import Landing, Packing, Ring, Staging, aligned
from .graphs import Graph, GraphManager, eager_capacity
from .models.base import PIXELS, Tower
from .parts import Batch, Failure, Part
from .streams import Event, Streams
from .types import Capacity, Dispatched, ItemPlan, Load, Outcome, Reason

SWITCH_INTERVAL_S = 0.0002
"""A thread waits for the interpreter lock at most this long; the default of 5 ms is a batch's worth."""

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
    began_at: float  # time.monotonic() when the device began with it
    host_s: float  # of the device thread, to launch it
    execute_s: float
    copy_s: float


@dataclass(slots=True)
class _Launched:
    """A batch on the device."""

    batch: Batch
    runs: list[PathRun]
    taken_at: float
    host_s: float
    turn: int
    began: Event
    computed: Event
    copied: Event
    peaks: torch.Tensor  # float32 [tokens] on the host: the largest magnitude of each row, NaN where one is in it
    kept: list[torch.Tensor]  # what another stream uses than the one that it is allocated on


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
        """`slots` is the shared arena as a uint8 tensor over all of its storage, pinned where there is a GPU.

        `capacities` size landing blocks and ring. `on_computed` is called when the device could take another batch.
        Without `video_graphs` a batch with a video in it runs eagerly.
        """
        self._tower = tower
        self._graphs = graphs
        self._use_graphs, self._video_graphs = use_graphs, video_graphs
        self._slots = slots
        self._slots_as = {name: slots[: slots.numel() // 4 * 4].view(dtype) for name, dtype in DTYPES.items()}
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
        staged = len(specs) * aligned(graphs.meta_bytes) + 4 * rows
        self._staging = [Staging(staged, tower.device) for _ in range(2)]
        self._ring = Ring(rows, tower.planner.layout.width, tower.dtype, tower.device)
        self._ring_free = [threading.Semaphore(1), threading.Semaphore(1)]
        self._computed: list[Event | None] = [None, None]  # of the last batch whose pixels were in a landing block
        self._turn = 0
        self._launched: queue.SimpleQueue[_Launched | None] = queue.SimpleQueue()

    # --- device thread

    @torch.inference_mode()
    def land(self, part: Part) -> int:
        """Start the copy of a part's pixels to the device; returns where they begin in the landing block."""
        start, landing, before = part.work.pixels, self._landings[self._turn], self._computed[self._turn]
        self._streams.copy_in()
        if before is not None and not landing.used:
            self._streams.wait(before)
        return landing.add(self._slots[start : start + part.plan.pixel_bytes])

    def run(self, batch: Batch) -> None:
        """Launch one batch, at most one behind another that is not computed; one without parts is over at once.

        After an exception nothing of it will finish: let the device end what it still does, then run it again, or
        `discard` it.
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
        self._computed[turn] = launched.computed
        self._launched.put(launched)
        self._turn = 1 - turn
        self._landings[self._turn].open()

    def discard(self) -> None:
        """Forget the pixels of a batch that does not run; nothing on the device reads them any more."""
        self._landings[self._turn].open()

    @torch.inference_mode()
    def _launch(self, batch: Batch, turn: int, taken_at: float) -> _Launched:
        """What goes before the first replay keeps an idle device waiting, what goes behind it does not."""
        streams = self._streams
        streams.compute()
        began = streams.record()  # behind the batch before
        self._staging[turn].open()
        runs, lines = [], {}
        for path in self._tower.planner.paths:
            load = batch.load(path)
            if load.units:
                run, lines[path] = self._dispatch(path, batch, load, turn)
                runs.append(run)
        index = self._send_index(batch, lines, turn)
        rows = self._ring.half(turn, index.shape[0])
        peaks = kernels.gather(self._source(lines), index, rows)
        computed = streams.record()
        streams.copy_out()
        streams.wait(computed)
        self._copy_out(batch, rows)
        host_peaks = self._ring.peaks(turn, index.shape[0]).copy_(peaks, non_blocking=True)
        copied = streams.record()
        host_s = time.monotonic() - taken_at
        kept = [index, rows, peaks, self._landings[turn].block]
        return _Launched(batch, runs, taken_at, host_s, turn, began, computed, copied, host_peaks, kept)

    def _dispatch(self, path: str, batch: Batch, load: Load, turn: int) -> tuple[PathRun, torch.Tensor]:
        """Run one path, on the compute stream: the fork of the whole product. Returns how, and its output lines."""
        tower = self._tower
        allowed = self._use_graphs and (self._video_graphs or all(plan.kind != "video" for plan in batch.plans))
        graph = self._graphs.choose(path, load) if allowed else Reason.DISABLED
        if isinstance(graph, Graph):
            self._stage(path, batch, graph.packing, self._graphs.arena, turn)
            graph.replay()
            return PathRun(path, Outcome.HIT, graph.capacity.units, Reason.FITS, load), graph.output
        capacity = eager_capacity(tower.planner.paths[path], load)
        packing = Packing.of(tower.buffers(path, capacity))
        block = torch.empty(packing.size, dtype=torch.uint8, device=tower.device)
        self._stage(path, batch, packing, block, turn)
        lines = tower.forward(path, packing.tensors(block), capacity)
        return PathRun(path, Outcome.MISS, 0, graph, load), lines

    def _stage(self, path: str, batch: Batch, packing: Packing, block: torch.Tensor, turn: int) -> None:
        """Fill metadata and send it to the static buffers, and move the pixels there from where they landed."""
        staged = self._staging[turn].take(packing.meta_bytes)
        self._tower.fill(path, batch.plans, packing.metadata(staged.numpy()))
        block[: packing.meta_bytes].copy_(staged, non_blocking=True)
        landed = self._landings[turn].block
        for start, end, to in _runs(batch.parts, path):
            at = packing.meta_bytes + to
            block[at : at + end - start].copy_(landed[start:end])

    def _send_index(self, batch: Batch, lines: Mapping[str, torch.Tensor], turn: int) -> torch.Tensor:
        """The gather index on the device, int32 [tokens]: copied in while the replays run, awaited behind them."""
        counts = {path: lines[path].shape[0] if path in lines else 0 for path in self._tower.planner.paths}
        index = self._tower.gather_index(batch.plans, counts)
        staged = self._staging[turn].take(index.nbytes)
        staged.numpy()[...] = index.view(np.uint8)
        self._streams.copy_in()
        sent = staged.to(self._tower.device, non_blocking=True, copy=True).view(torch.int32)
        self._streams.compute()
        return sent

    def _source(self, lines: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What the gather index counts: the outputs of the paths in their order, then the constant rows."""
        constant = self._tower.constant_rows
        sources = [*lines.values(), *([constant] if constant is not None else [])]
        return sources[0] if len(sources) == 1 else torch.cat(sources)

    def _copy_out(self, batch: Batch, rows: torch.Tensor) -> None:
        """Copy each part's rows into its slot in its dtype, on the current stream."""
        width = rows.shape[1]
        for part, mine in zip(batch.parts, rows.split([plan.tokens for plan in batch.plans]), strict=True):
            slots = self._slots_as[part.work.dtype]
            at = part.work.rows // slots.itemsize + part.work.first_row * width
            slots.as_strided(mine.shape, (width, 1), at).copy_(mine.to(slots.dtype), non_blocking=True)

    # --- finisher

    def finish_forever(self) -> None:
        """The finisher's life: report each launched batch when it is done. Returns after `stop`."""
        while (launched := self._launched.get()) is not None:
            launched.computed.synchronize()
            computed_at = time.monotonic()
            self._on_computed()
            launched.copied.synchronize()
            finished = self._judge(launched, computed_at)
            self._ring_free[launched.turn].release()
            self._on_finished(finished)

    def stop(self) -> None:
        """Let the finisher end behind the last launched batch."""
        self._launched.put(None)

    def _judge(self, launched: _Launched, computed_at: float) -> Finished:
        peaks, results, start = launched.peaks.numpy(), [], 0
        sound = peaks.max(initial=0.0) <= FLOAT16_MAX  # in one look at all; false where a NaN is among them
        for part in launched.batch.parts:
            mine = peaks[start : start + part.plan.tokens]
            start += part.plan.tokens
            results.append(Result(part, None if sound else _judgement(mine, part.work.dtype)))
        streams = self._streams
        execute_s = streams.between(launched.began, launched.computed)
        began_at = max(launched.taken_at, computed_at - execute_s)
        copy_s = streams.between(launched.computed, launched.copied)
        return Finished(results, launched.runs, began_at, launched.host_s, execute_s, copy_s)


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
