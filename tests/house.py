"""Everything of an engine but its sockets, on the two-path tower, with poison on whatever is given back."""

from __future__ import annotations

import threading

import numpy as np
import torch

from fake_tower import FakeTower, expected
from opticnerve_server.batcher import Batch, Batcher, Failure, Part
from opticnerve_server.dispatcher import Dispatcher, Finished
from opticnerve_server.graphs import GraphManager, plan_capacities
from opticnerve_server.ledger import Item, Ledger, Progress
from opticnerve_server.messages import Granted, ItemRequest, Reserve, Submit
from opticnerve_server.models.base import ImageItem
from opticnerve_server.runner import Runner
from opticnerve_server.sentinel import Sentinel

ARENA_BYTES = 4 << 20
EXPIRED = Failure("EXPIRED_IN_QUEUE", "too late")


class PoisonOnRelease:
    """The semaphore of a ring half that overwrites the half when it is given back."""

    def __init__(self, half: torch.Tensor, semaphore: threading.Semaphore) -> None:
        self.half, self._semaphore = half, semaphore
        self.held = False

    def acquire(self) -> None:
        self._semaphore.acquire()
        self.held = True

    def release(self) -> None:
        self.half.fill_(float("nan"))
        self.held = False
        self._semaphore.release()


class House:
    """The batches that are taken go through a runner, or straight to its dispatcher."""

    def __init__(self, tower: FakeTower | None = None, *, use_graphs: bool = True, cap: int = 64, **plan) -> None:
        self.tower = tower or FakeTower()
        self.capacities = plan.pop("capacities", None) or plan_capacities(
            self.tower.planner.paths, explicit={}, cap=cap, max_items=8, launches_by_segments=False, **plan
        )
        self.graphs = GraphManager(self.tower, self.capacities)
        with torch.inference_mode():
            if use_graphs:
                self.graphs.capture(lambda *_: None, on_failure="fail")
        self.slots = torch.full((ARENA_BYTES,), 255, dtype=torch.uint8)
        self.ledger = Ledger(max_items=200, max_tokens=100_000, max_bytes=ARENA_BYTES)
        self.batcher = Batcher(self.ledger, self.tower.planner, self.capacities)
        self.dispatcher = Dispatcher(
            self.tower,
            self.graphs,
            self.slots,
            capacities=self.capacities,
            use_graphs=use_graphs,
            on_computed=self._computed,
            on_finished=self._finished,
        )
        ring, free = self.dispatcher._ring, self.dispatcher._ring_free
        free[:] = [PoisonOnRelease(half, semaphore) for half, semaphore in zip(ring._halves, free, strict=True)]
        self.runner = Runner(
            self.dispatcher,
            Sentinel(self.graphs, self.capacities),
            fail=self._fail,
            free=self.batcher.device_free,
            changed=lambda: self.told.append(self.runner.works),
        )
        self.told: list[bool] = []
        self.failed: dict[int, Failure] = {}
        self.computed = 0
        self.finished: list[Finished] = []
        self.rows: dict[int, np.ndarray] = {}
        self.media: dict[int, np.ndarray] = {}
        self.calls = 0
        self.call_of: dict[Item, int] = {}
        self.tower.forwards.clear()

    def submit(self, height: int, width: int, *, dtype: str = "float32", deadline: float = 1e12) -> Item:
        rng = np.random.default_rng(self.calls)
        media = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        plan = self.tower.planner.plan(ImageItem(height, width))
        request = ItemRequest(plan.tokens, 0, plan.pixel_bytes, plan.tokens * 2 * 4)
        ((_, granted),) = self.ledger.reserve(0, Reserve(self.calls, [0], [request], deadline))
        assert isinstance(granted, Granted)
        item, _ = self.ledger.submit(0, Submit(self.calls, 0, plan, dtype))
        assert item is not None
        self.tower.planner.fill_pixels(media, plan, self.pixels(item).numpy())
        self.call_of[item] = self.calls
        self.media[self.calls] = media
        self.calls += 1
        self.batcher.put(item)
        return item

    def pixels(self, item: Item) -> torch.Tensor:
        return self.slots[item.slot.pixels : item.slot.pixels + item.placed.pixel_bytes]

    def fill(self) -> None:
        """Let the open batch fill, and its pixels land."""
        with self.batcher._changed:
            joined = self.batcher._join()
        for part in joined:
            part.landed_at = self.runner.land(part)

    def free(self) -> None:
        """The device could take a batch."""
        self.batcher.device_free()

    def take(self) -> Batch:
        batch = self.batcher.take(self.runner.land, lambda: None)
        assert batch is not None
        return batch

    def run_all(self) -> None:
        """Run what is queued, with a finisher beside, as the engine does."""
        finisher = threading.Thread(target=self.dispatcher.finish_forever)
        finisher.start()
        self.batcher.stop()
        while (batch := self.batcher.take(self.runner.land, self.runner.idle)) is not None:
            for part in batch.dropped:
                self._fail(part, part.failure or EXPIRED)
            self.runner.run(batch)
        self.dispatcher.stop()
        finisher.join(10)
        assert not finisher.is_alive()

    def _computed(self) -> None:
        """Poison what a computed batch gives back, before the next one may start. A batch without parts had nothing."""
        if not self.dispatcher._ring_free[self.computed % 2].held:
            self.runner.computed()
            return
        with torch.inference_mode():
            self.dispatcher._landings[self.computed % 2].block.fill_(255)
            self.dispatcher._staging[self.computed % 2].block.fill_(255)
            self.graphs.arena.fill_(255)
            for output in self.graphs._outputs.values():
                output.fill_(float("nan"))
        self.computed += 1
        self.runner.computed()

    def _finished(self, finished: Finished) -> None:
        self.finished.append(finished)
        for result in finished.results:
            part, item = result.part, result.part.item
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
        return {self.call_of[result.part.item]: result.failure for result in results}

    def _fail(self, part: Part, failure: Failure) -> None:
        call = self.call_of[part.item]
        assert call not in self.failed, "an item of one part fails once"
        self.failed[call] = failure
        self.ledger.fail(part.item, *failure)

    def check(self, call: int) -> None:
        plan = self.tower.planner.plan(ImageItem(*self.media[call].shape[:2]))
        np.testing.assert_allclose(self.rows[call], expected(self.media[call], plan), rtol=1e-6)
