"""What holds of batches, of the store and of plans, whatever comes in whatever order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_tower import FakePlanner
from opticnerve_server.batcher import MAX_STARTED, Batcher, Engine, QueuedPart
from opticnerve_server.bench.inprocess import path_states
from opticnerve_server.budgets import holds
from opticnerve_server.claims import Item, Progress
from opticnerve_server.ledger import Ledger
from opticnerve_server.messages import Done, Granted, ItemRequest, Land, PartDone, Reserve, Run, Submit
from opticnerve_server.models import registry
from opticnerve_server.models.base import ImageItem, PlanError, Planner, Sampling, VideoItem
from opticnerve_server.store import Lease, Store
from opticnerve_server.types import Capacity, ItemPlan, Load

# --- batches

CAPACITIES = {
    "main": [Capacity(8, 4, 4, 64), Capacity(24, 4, 4, 64)],
    "side": [Capacity(2, 1, 1, 2), Capacity(4, 2, 2, 2)],
}
ITEMS = st.tuples(st.sampled_from("ab"), st.integers(1, 5), st.integers(1, 6))  # tenant, height, width, in blocks
STEPS = st.one_of(
    st.tuples(st.just("reserve"), ITEMS),
    st.tuples(st.sampled_from(["submit", "release"]), st.integers(0, 9)),  # of those that wait for it, which
    st.tuples(st.just("take"), st.integers(0, 9)),  # whose caller leaves while it lands
)


def budgets(parts: list[QueuedPart]) -> dict[str, int]:
    """The units of the graph of each path that a batch runs; paths that it does not run are left out."""
    loads = {path: Load.of(part.plan.paths[path] for part in parts) for path in CAPACITIES}
    return {
        path: min(capacity.units for capacity in CAPACITIES[path] if holds(capacity, load))
        for path, load in loads.items()
        if load.units
    }


class Queue:
    """A batcher with its ledger, and who should be where."""

    def __init__(self) -> None:
        self.planner = FakePlanner()
        self.ledger = Ledger(max_items=1000, max_tokens=10**6, max_bytes=1 << 24)
        self.batcher = Batcher(self.ledger)
        self.said: list[Land | Run] = []
        self.engine = Engine(0, path_states(self.planner, CAPACITIES, use_graphs=True), self.hear)
        self.batcher.engines[0] = self.engine
        self.plans: dict[int, ItemPlan] = {}  # by call, as are the next
        self.tenants: dict[int, str] = {}
        self.submitted: dict[int, Item] = {}
        self.ready: dict[int, Item] = {}  # of these, what somebody waits for
        self.landed: set[int] = set()  # calls, as are the next
        self.ran: list[int] = []
        self.numbers = itertools.count()

    def hear(self, message: Land | Run) -> None:
        self.said.append(message)
        if isinstance(message, Land):
            call = self.call_of(self.engine.open[message.part.number])
            tenant = self.tenants[call]
            waiting = [each for each in self.ready if self.tenants[each] == tenant and each not in self.landed]
            assert call == min(waiting) or self.is_padding(call), "first come, first served"
            self.landed.add(call)

    def is_padding(self, call: int) -> bool:
        """Whether the open batch runs the same graphs without the part of this call."""
        parts = list(self.engine.open.values())
        return budgets(parts) == budgets([part for part in parts if self.call_of(part) != call])

    def reserve(self, shape: tuple[str, int, int]) -> None:
        tenant, height, width = shape
        call, plan = next(self.numbers), self.planner.plan(ImageItem(4 * height, 4 * width))
        request = ItemRequest(plan.tokens, 0, plan.pixel_bytes, plan.tokens * 8)
        ((_, granted),) = self.ledger.reserve(0, Reserve(call, [0], [request], 1e12, tenant))
        if isinstance(granted, Granted):
            self.plans[call], self.tenants[call] = plan, tenant

    def submit(self, which: int) -> None:
        waiting = [call for call in self.plans if call not in self.ready]
        if waiting:
            call = waiting[which % len(waiting)]
            item, _ = self.ledger.submit(0, Submit(call, 0, self.plans[call], "float32"))
            assert item is not None
            self.submitted[call] = self.ready[call] = item
            self.batcher.put(item, [self.plans[call]])

    def release(self, which: int) -> None:
        if self.plans:
            call = sorted(self.plans)[which % len(self.plans)]
            self.ledger.release(0, call, 0)
            del self.plans[call]
            self.ready.pop(call, None)

    def take(self, leaving: int) -> None:
        if not self.ready and not self.engine.open:
            return
        self.batcher.fill()
        left = []  # by their callers: now, or since they landed while the batch before ran
        for part in list(self.engine.open.values()):
            call = self.call_of(part)
            if call in self.ready and call % 10 == leaving:
                self.ledger.release(0, call, 0)
                del self.plans[call], self.ready[call]
            if call not in self.ready:
                left.append(part)
        self.said.clear()
        dropped = self.batcher.schedule()
        assert dropped == left
        for part in left:
            self.ledger.fail(part.item, "EXPIRED_IN_QUEUE", "")
        started = [message.numbers for message in self.said if isinstance(message, Run)]
        assert 1 <= len(started) <= MAX_STARTED
        assert [number for numbers in started for number in numbers] == list(self.engine.running)
        for numbers in started:
            self.run([self.engine.running[number] for number in numbers])

    def run(self, parts: list[QueuedPart]) -> None:
        calls = [self.call_of(part) for part in parts]
        assert len(set(calls)) == len(calls)
        if len(calls) > 1:
            for path, capacities in CAPACITIES.items():
                load = Load.of(part.plan.paths[path] for part in parts)
                assert not load.units or any(holds(capacity, load) for capacity in capacities)
        assert self.batcher.done(0, Done([PartDone(part.number, []) for part in parts], 0.0, 0.01, 0.0)) == parts
        for part, call in zip(parts, calls, strict=True):
            assert part.plan == self.plans.pop(call)
            self.ledger.from_device(self.ready.pop(call), Progress(0, part.plan.tokens, []))
            self.ledger.release(0, call, 0)
        self.ran += calls
        self.batcher.computed(0)

    def call_of(self, part: QueuedPart) -> int:
        return next(call for call, item in self.submitted.items() if item is part.item)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_no_item_is_lost_or_run_twice(steps: list[tuple[str, object]]) -> None:
    queue = Queue()
    for name, argument in steps:
        getattr(queue, name)(argument)
    for _ in list(queue.plans):
        queue.submit(0)
    while queue.ready or queue.engine.open:
        queue.take(-1)
    assert queue.engine.started == 0
    assert queue.batcher.schedule() == []
    assert not queue.plans
    assert len(set(queue.ran)) == len(queue.ran)
    assert queue.ledger.occupancy().items == queue.ledger.occupancy().bytes == queue.ledger.on_device == 0


# --- the store

MAX_BYTES = 10


@dataclass(eq=False)
class Rows:
    """As the ledger's items."""

    key: bytes
    store_bytes: int
    leases: list[Lease] = field(default_factory=list)
    is_stored: bool = False
    is_read: bool = False


USES = st.lists(
    st.tuples(
        st.sampled_from(["keep", "read", "leave", "lease", "end", "evict", "wait"]),
        st.integers(0, 5),
        st.integers(1, 6),
    ),
    max_size=60,
)


class Shelf:
    """A store, and the same in the plainest way: what is kept, the least recently used first."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.store: Store[Rows] = Store(MAX_BYTES, now=lambda: self.clock)
        self.rows: dict[int, Rows] = {}
        self.kept: list[Rows] = []

    def use(self, name: str, number: int, amount: int) -> None:
        rows = self.rows.setdefault(number, Rows(bytes([number]), amount))
        match name:
            case "keep" if not rows.is_stored:
                self.drop(list(self.store.keep(rows)), new=rows)
            case "read" | "leave":
                rows.is_read = name == "read"
                self.store.touch(rows)
            case "lease" if self.store.can_lease(rows, rows.store_bytes):
                self.store.lease(rows, amount, reads=amount % 3)
            case "end" if rows.leases:
                self.store.end(rows, rows.leases[0])
            case "evict":
                gone = self.store.evict()
                self.drop([] if gone is None else [gone])
                return
            case "wait":
                self.clock += amount
                for expired in self.store.expired():
                    self.used(expired)
                return
            case _:
                return
        self.used(rows)

    def used(self, rows: Rows) -> None:
        if rows in self.kept:
            self.kept.remove(rows)
            self.kept.append(rows)

    def drop(self, gone: list[Rows], new: Rows | None = None) -> None:
        for rows in gone:
            if rows is new:
                return
            idle = [other for other in self.kept if not other.is_read and not other.leases]
            assert rows is idle[0], "the least recently used goes first, and nothing that is read or promised"
            self.kept.remove(rows)
        if new is not None:
            self.kept.append(new)

    def check(self) -> None:
        assert {rows.key for rows in self.rows.values() if rows.is_stored} == {rows.key for rows in self.kept}
        assert self.store.items == len(self.kept)
        assert self.store.used_bytes == sum(rows.store_bytes for rows in self.kept)
        promised = [rows for rows in self.rows.values() if rows.leases]
        assert self.store.leased_bytes == sum(rows.store_bytes for rows in promised) <= MAX_BYTES
        over = self.store.used_bytes - MAX_BYTES
        assert over <= sum(rows.store_bytes for rows in promised if rows.is_stored), "only promises go over the bound"


@settings(max_examples=300, deadline=None)
@given(USES)
def test_the_store_is_bounded_and_keeps_what_is_in_use(uses: list[tuple[str, int, int]]) -> None:
    shelf = Shelf()
    for use in uses:
        shelf.use(*use)
        shelf.check()


# --- plans

MODELS = (
    *("qwen3-vl-2b", "qwen2.5-vl-3b", "glm-4.1v-9b", "gemma-4-e2b", "gemma-3-4b", "llama-4-scout", "kimi-vl-a3b"),
    *("deepseek-ocr", "step-3.7-flash"),
)


@pytest.fixture(scope="module", params=MODELS)
def planner(request: pytest.FixtureRequest) -> Planner:
    return registry.build_planner(registry.open_model(f"preset:{request.param}", "dummy"))


def check_sums(planner: Planner, plan: ItemPlan) -> None:
    assert plan.tokens == sum(span.rows for span in plan.spans) > 0
    assert plan.paths.keys() == planner.paths.keys()
    for name, path in plan.paths.items():
        rows = path.units * planner.paths[name].rows_per_unit
        assert (path.units > 0) == (path.segments > 0) == (path.longest > 0) == (path.pixel_bytes > 0)
        assert path.longest <= rows <= path.segments * path.longest


def cut(planner: Planner, plan: ItemPlan, most: int) -> list[ItemPlan]:
    def held(part: ItemPlan) -> bool:
        return all(path.units <= most for path in part.paths.values())

    parts = planner.split(plan, held)
    assert len(parts) == 1 or all(map(held, parts))
    return parts


@settings(max_examples=40, deadline=None)
@given(size=st.tuples(st.integers(1, 4000), st.integers(1, 4000)), frames=st.integers(0, 40), most=st.integers(1, 4096))
def test_plans_add_up(planner: Planner, size: tuple[int, int], frames: int, most: int) -> None:
    wanted = ImageItem(*size)
    if frames and "video" in planner.modalities:
        wanted = VideoItem(frames, 2.0, *size, Sampling())
    try:
        plan = planner.plan(wanted)
    except PlanError:
        return
    check_sums(planner, plan)
    parts = cut(planner, plan, most)
    assert sum(part.tokens for part in parts) == plan.tokens
    assert sum(part.pixel_bytes for part in parts) == plan.pixel_bytes
    for name, path in plan.paths.items():
        whole = Load.of(part.paths[name] for part in parts)
        assert (whole.units, whole.segments, whole.longest) == (path.units, path.segments, path.longest)
