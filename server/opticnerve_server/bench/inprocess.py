"""An engine without processes and sockets: ledger, batcher, graphs and dispatcher around one tower, in this process.

For benchmarks and GPU tests. Items are submitted with their pixels in the slots, as front-ends leave them; a call ends
when its rows are in the slots, where front-ends would find them.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from ..batcher import Batcher, Engine, QueuedPart
from ..budgets import cut
from ..claims import Item, Progress
from ..dispatcher import DTYPES, SWITCH_INTERVAL_S, Dispatcher, Finished
from ..graphs import GraphManager
from ..ledger import Ledger
from ..messages import Done, Granted, ItemRequest, Land, PartDone, PathState, Reserve, Run, Submit
from ..models.base import Planner, Tower
from ..parts import Batch, Failure, Intake, Part
from ..types import ROW_BYTES, Capacity, ItemPlan


def path_states(
    planner: Planner, capacities: Mapping[str, Sequence[Capacity]], *, use_graphs: bool
) -> dict[str, PathState]:
    """What an engine would say of its paths."""
    return {
        name: PathState(
            name,
            sorted({capacity.units for capacity in capacities[name]}) if use_graphs else [],
            len(capacities[name]) if use_graphs else 0,
            0,
            0.0,
            path.rows_per_unit,
            path.tokens_per_unit,
            list(capacities[name]),
        )
        for name, path in planner.paths.items()
    }


class InProcessEngine:
    """Runs batches on a thread of its own; use as a context manager.

    `on_finished` runs on the finisher, with the parts of a batch whose rows are in their slots; with `landed_first` a
    batch is given to the dispatcher only when its pixels are on the device. Of every batch it keeps, until `forget`:
    what became of it (`batches`), when the dispatcher was given it and when it was computed (`given_at`, `computed_at`,
    by time.perf_counter()), and what the device thread has spent on it, landing pixels and launching (`host_s`).
    """

    def __init__(
        self,
        tower: Tower,
        graphs: GraphManager,
        capacities: Mapping[str, Sequence[Capacity]],
        *,
        use_graphs: bool,
        slot_bytes: int = 2 << 30,
    ) -> None:
        """`capacities` bound batches."""
        self.tower = tower
        self.slots = torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=tower.device.type == "cuda")
        self.ledger = Ledger(max_items=1 << 16, max_tokens=1 << 30, max_bytes=slot_bytes)
        self._capacities = capacities
        self._inbox: queue.SimpleQueue[Land | Run | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the batcher
        self.batcher = Batcher(self.ledger)
        states = path_states(tower.planner, capacities, use_graphs=use_graphs)
        self.batcher.engines[0] = Engine(0, states, self._inbox.put)
        self.dispatcher = Dispatcher(
            tower,
            graphs,
            self.slots,
            capacities=capacities,
            use_graphs=use_graphs,
            on_computed=self._computed,
            on_finished=self._finished,
        )
        self.on_finished: Callable[[Sequence[QueuedPart]], None] = lambda parts: None
        self.landed_first = False
        self.batches: list[Finished] = []
        self.given_at: list[float] = []
        self.computed_at: list[float] = []
        self.host_s: list[float] = []
        self._landing_s = 0.0
        self.error: BaseException | None = None
        self._calls = 0
        self._waiting = 0  # rows
        self._done = threading.Condition()
        self._threads = [
            threading.Thread(target=self._device_forever), threading.Thread(target=self.dispatcher.finish_forever)
        ]  # fmt: skip

    def __enter__(self) -> Self:
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._inbox.put(None)
        for thread in self._threads:
            thread.join()
        sys.setswitchinterval(self._interval)

    def place(self, plans: Sequence[ItemPlan], pixels: Sequence[npt.NDArray[np.uint8]], dtype: str) -> list[Item]:
        """Grant slots to the items of one call and write their pixels; the caller submits or frees them."""
        call, self._calls = self._calls, self._calls + 1
        width = self.tower.planner.layout.width
        requests = [ItemRequest(p.tokens, 0, p.pixel_bytes, p.tokens * width * ROW_BYTES[dtype]) for p in plans]
        ((_, granted),) = self.ledger.reserve(0, Reserve(call, list(range(len(plans))), requests))
        assert isinstance(granted, Granted), granted
        items = []
        for index, (plan, grant, data) in enumerate(zip(plans, granted.grants, pixels, strict=True)):
            start = grant.slot.pixels
            self.slots[start : start + plan.pixel_bytes].numpy()[...] = data.reshape(-1)
            item, _ = self.ledger.submit(0, Submit(call, index, plan, dtype))
            assert item is not None
            items.append(item)
        return items

    def run(self, items: Sequence[Item]) -> float:
        """Run placed items as one call; returns the seconds until all rows are in the slots."""
        self._waiting = sum(item.placed.tokens for item in items)
        started = time.perf_counter()
        self.put(items)
        with self._done:
            self._done.wait_for(lambda: not self._waiting or self.error is not None)
        if self.error is not None:
            raise self.error
        return time.perf_counter() - started

    def put(self, items: Sequence[Item]) -> None:
        """Let placed items run, all at once, so that they meet in as few batches as fit; also those that have run."""
        with self._lock:
            for item in items:
                item.progress.clear()
                self.batcher.put(item, self._split(item.placed))
            self.batcher.schedule()

    def forget(self) -> None:
        """Empty the records of what has run."""
        for record in (self.batches, self.given_at, self.computed_at, self.host_s):
            record.clear()

    def rows(self, item: Item) -> torch.Tensor:
        """The rows of an item that has run: a copy, [tokens, width]."""
        dtype = DTYPES[item.dtype]
        count = item.placed.tokens * self.tower.planner.layout.width
        start = item.slot.rows
        return (
            self.slots[start : start + count * dtype.itemsize].view(dtype).view(-1, count // item.placed.tokens).clone()
        )

    def free(self, items: Sequence[Item]) -> None:
        """Give the slots back."""
        for item in items:
            (claim,) = item.claims
            self.ledger.release(*claim.id)

    def _split(self, plan: ItemPlan) -> list[ItemPlan]:
        return cut(plan, self.tower.planner, self._capacities)

    def _device_forever(self) -> None:
        intake = Intake(self._land, self._launch, _never)
        try:
            while (message := self._inbox.get()) is not None:
                intake.handle(message)
        except BaseException as error:
            self.error = error
            with self._done:
                self._done.notify_all()
        finally:
            self.dispatcher.stop()

    def _land(self, part: Part) -> int:
        started = time.perf_counter()
        at = self.dispatcher.land(part)
        self._landing_s += time.perf_counter() - started
        return at

    def _launch(self, batch: Batch) -> None:
        if self.landed_first and self.tower.device.type == "cuda":
            torch.cuda.synchronize(self.tower.device)
        given = time.perf_counter()
        self.given_at.append(given)
        self.dispatcher.run(batch)
        self.host_s.append(self._landing_s + time.perf_counter() - given)
        self._landing_s = 0.0

    def _computed(self) -> None:
        self.computed_at.append(time.perf_counter())
        with self._lock:
            self.batcher.computed(0)
            self.batcher.schedule()

    def _finished(self, finished: Finished) -> None:
        self.batches.append(finished)
        done = [PartDone(result.part.work.number, []) for result in finished.results]
        with self._lock:
            parts = self.batcher.done(0, Done(done, finished.began_at, finished.execute_s, finished.copy_s))
        for part in parts:
            self.ledger.from_device(part.item, Progress(part.first_row, part.plan.tokens, []))
        self.on_finished(parts)
        with self._done:
            self._waiting -= sum(part.plan.tokens for part in parts)
            self._done.notify_all()


def _never(part: Part, failure: Failure) -> None:
    raise RuntimeError(failure.message)
