"""Everything of an engine but its sockets, on the two-path tower, with poison on whatever is given back."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from fake_tower import FakeTower, expected
from opticnerve_server.batcher import Batcher, Engine, QueuedPart
from opticnerve_server.bench.inprocess import path_states
from opticnerve_server.budgets import cut
from opticnerve_server.buffers import Staging
from opticnerve_server.claims import Item, Progress
from opticnerve_server.dispatcher import Dispatcher, Finished
from opticnerve_server.graphs import GraphManager, plan_capacities
from opticnerve_server.ledger import Ledger
from opticnerve_server.messages import Done, Granted, ItemRequest, Land, PartDone, Reserve, Run, Submit
from opticnerve_server.models.base import ImageItem
from opticnerve_server.parts import Batch, Failure, Intake, Part
from opticnerve_server.runner import Runner
from opticnerve_server.sentinel import Sentinel
from opticnerve_server.types import Launch

ARENA_BYTES = 4 << 20


class PoisonOnRelease:
    """The semaphore of a ring half that overwrites the half when it is given back."""

    def __init__(self, half: torch.Tensor, semaphore: threading.Semaphore) -> None:
        self.half, self._semaphore = half, semaphore

    def acquire(self) -> None:
        self._semaphore.acquire()

    def release(self) -> None:
        self.half.fill_(float("nan"))
        self._semaphore.release()


def behind(first: Callable[[], object], then: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        then()

    return both


class House:
    """The batches that are taken go through a runner, or straight to its dispatcher."""

    def __init__(self, tower: FakeTower | None = None, *, use_graphs: bool = True, cap: int = 64, **plan) -> None:
        self.tower = tower or FakeTower()
        self.capacities = plan.pop("capacities", None) or plan_capacities(
            self.tower.planner.paths, explicit={}, cap=cap, max_items=8, launch=Launch.ROWS, **plan
        )
        self.graphs = GraphManager(self.tower, self.capacities)
        with torch.inference_mode():
            if use_graphs:
                self.graphs.capture(lambda *_: None, on_failure="fail")
        self.slots = torch.full((ARENA_BYTES,), 255, dtype=torch.uint8)
        self.ledger = Ledger(max_items=200, max_tokens=100_000, max_bytes=ARENA_BYTES)
        self.inbox: queue.SimpleQueue[Land | Run] = queue.SimpleQueue()
        self.batcher = Batcher(self.ledger)
        self.engine = Engine(0, path_states(self.tower.planner, self.capacities, use_graphs=use_graphs), self.inbox.put)
        self.batcher.engines[0] = self.engine
        self._lock = threading.RLock()  # of the batcher
        self.dispatcher = Dispatcher(
            self.tower,
            self.graphs,
            self.slots,
            capacities=self.capacities,
            use_graphs=use_graphs,
            on_computed=lambda: self.runner.computed(),
            on_finished=self._finished,
        )
        for landing in self.dispatcher._landings:
            landing.open = behind(partial(landing.block.numpy().fill, 255), landing.open)
        for staging in self.dispatcher._staging:
            staging.open = behind(partial(self._poison_launch, staging), staging.open)
        ring, free = self.dispatcher._ring, self.dispatcher._ring_free
        free[:] = [PoisonOnRelease(half, semaphore) for half, semaphore in zip(ring._halves, free, strict=True)]
        self.runner = Runner(
            self.dispatcher,
            Sentinel(self.graphs, self.capacities),
            fail=self._fail,
            free=self.free,
            changed=lambda: self.told.append(self.runner.works),
        )
        self.taken: list[Batch] = []
        self.dropped: list[QueuedPart] = []
        self.call_by_number: dict[int, int] = {}
        self._run: Callable[[Batch], None] = self.taken.append
        self._intake = Intake(lambda part: self.runner.land(part), lambda batch: self._run(batch), self._fail)
        self.told: list[bool] = []
        self.failed: dict[int, Failure] = {}
        self.finished: list[Finished] = []
        self.rows: dict[int, np.ndarray] = {}
        self.media: dict[int, np.ndarray] = {}
        self.calls = 0
        self.call_of: dict[Item, int] = {}
        self.tower.forwards.clear()

    def submit(
        self, height: int, width: int, *, dtype: str = "float32", deadline: float = 1e12, tenant: str = ""
    ) -> Item:
        rng = np.random.default_rng(self.calls)
        media = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        plan = self.tower.planner.plan(ImageItem(height, width))
        request = ItemRequest(plan.tokens, 0, plan.pixel_bytes, plan.tokens * 2 * 4)
        ((_, granted),) = self.ledger.reserve(0, Reserve(self.calls, [0], [request], deadline, tenant))
        assert isinstance(granted, Granted)
        item, _ = self.ledger.submit(0, Submit(self.calls, 0, plan, dtype))
        assert item is not None
        self.tower.planner.fill_pixels(media, plan, self.pixels(item).numpy())
        self.call_of[item] = self.calls
        self.media[self.calls] = media
        self.calls += 1
        self.put(item)
        return item

    def put(self, item: Item) -> None:
        parts = cut(item.placed, self.tower.planner, self.capacities)
        with self._lock:
            self.batcher.put(item, parts)
            self.call_by_number[self.batcher._numbers] = self.call_of[item]

    def pixels(self, item: Item) -> torch.Tensor:
        return self.slots[item.slot.pixels : item.slot.pixels + item.placed.pixel_bytes]

    def fill(self) -> None:
        """Let the open batch fill, and its pixels land."""
        self.batcher.fill()
        while self.inbox.qsize():
            self._intake.handle(self.inbox.get())

    def take(self) -> Batch:
        """The open batch, landed, as the device takes it now."""
        self.free()
        while not self.taken:  # what is behind its Run lands when it has run
            self._intake.handle(self.inbox.get_nowait())
        return self.taken.pop()

    def free(self) -> None:
        """The device has computed what it had, and could take a batch."""
        with self._lock:
            if self.engine.started:
                self.batcher.computed(0)
            self.dropped += self.batcher.schedule()

    def run_all(self) -> None:
        """Run what is queued, with a finisher beside, as the engine does."""
        finisher = threading.Thread(target=self.dispatcher.finish_forever)
        finisher.start()
        self._run = self.runner.run
        with self._lock:
            self.dropped += self.batcher.schedule()
        while self.inbox.qsize() or self.engine.open or self.engine.running or self.engine.started:
            try:
                self._intake.handle(self.inbox.get(timeout=0.02))
            except queue.Empty:
                self.runner.idle()
        self.dispatcher.stop()
        finisher.join(10)
        assert not finisher.is_alive()
        self._run = self.taken.append

    def finish_behind(self, launching: threading.Thread) -> None:
        """Let the finisher report what was launched, which `launching` waits for, and end both."""
        finisher = threading.Thread(target=self.dispatcher.finish_forever)
        finisher.start()
        launching.join(10)
        self.dispatcher.stop()
        finisher.join(10)
        assert not launching.is_alive()
        assert not finisher.is_alive()

    def _poison_launch(self, staging: Staging) -> None:
        """What a launch finds that reads what it has not written; not by torch, which a test may watch."""
        staging.block.numpy().fill(255)
        self.graphs.arena.numpy().fill(255)
        for output in self.graphs._outputs.values():
            output.numpy().fill(np.nan)

    def _finished(self, finished: Finished) -> None:
        self.finished.append(finished)
        done = [PartDone(result.part.work.number, []) for result in finished.results]
        with self._lock:
            parts = self.batcher.done(0, Done(done, finished.began_at, finished.execute_s, finished.copy_s))
        for result, part in zip(finished.results, parts, strict=True):
            item = part.item
            self.pixels(item)[:] = 255
            if result.failure is None and self.ledger.from_device(item, Progress(part.first_row, part.plan.tokens, [])):
                raw = self.slots[item.slot.rows : item.slot.end].numpy()
                dtype = {"float32": np.float32, "float16": np.float16}[item.dtype]
                count = item.placed.tokens * 2
                self.rows[self.call_of[item]] = raw[: count * dtype().itemsize].copy().view(dtype).reshape(-1, 2)
                self.slots[item.slot.rows : item.slot.end] = 255

    def failures(self) -> dict[int, object]:
        """By call, None for those that have rows."""
        results = [result for finished in self.finished for result in finished.results]
        return {self.call_by_number[result.part.work.number]: result.failure for result in results}

    def calls_of(self, batch: Batch) -> list[int]:
        return [self.call_by_number[part.work.number] for part in batch.parts]

    def _fail(self, part: Part, failure: Failure) -> None:
        call = self.call_by_number[part.work.number]
        assert call not in self.failed, "an item of one part fails once"
        self.failed[call] = failure
        with self._lock:
            queued = self.engine.forget(part.work.number)
        assert queued is not None
        self.ledger.fail(queued.item, *failure)

    def check(self, call: int) -> None:
        plan = self.tower.planner.plan(ImageItem(*self.media[call].shape[:2]))
        np.testing.assert_allclose(self.rows[call], expected(self.media[call], plan), rtol=1e-6)
