"""Which engine a part joins, and what batches several engines form; without devices and processes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import pytest

from opticnerve_server import balance
from opticnerve_server.balance import FLOOR_ROWS, SEGMENT_ROWS, Imbalance, Pace, cost_of
from opticnerve_server.batcher import Batcher, Engine, QueuedPart
from opticnerve_server.bench import balance as bench
from opticnerve_server.claims import Progress
from opticnerve_server.ledger import Ledger
from opticnerve_server.messages import (
    Done,
    Granted,
    ItemRequest,
    Land,
    PartDone,
    PathState,
    Reserve,
    Run,
    Submit,
)
from opticnerve_server.types import Capacity, ItemPlan, PathPlan

UNITS = 4096
PATHS = {"main": PathState("main", [UNITS], 1, 0, 0.0, 4, 1, [Capacity(UNITS, 64, 64, 4 * UNITS)])}
SMALL, LARGE = 64, 1024  # units: a quarter of the floor, and four times the floor


def plan_of(units: int, segments: int = 1) -> ItemPlan:
    path = PathPlan(units, segments, 4 * units // segments, 100)
    return ItemPlan("image", 1, 1, (1, 1, 1), 1, units, {"main": path}, ())


class Host:
    """Engines that do what they are told, when the test says so."""

    def __init__(self, engines: int, now: Callable[[], float] = time.monotonic) -> None:
        self.ledger = Ledger(max_items=4096, max_tokens=1 << 30, max_bytes=1 << 30)
        self.batcher = Batcher(self.ledger, now)
        self.said: dict[int, list[Land | Run]] = {}
        self.calls = itertools.count()
        self.answered: list[int] = []  # calls
        for device in range(engines):
            self.attach(device)

    def attach(self, device: int) -> None:
        self.said[device] = []
        self.batcher.engines[device] = Engine(device, PATHS, self.said[device].append)

    def put(self, *units: int) -> None:
        """Items of a call each, ready at the same time."""
        for count in units:
            call, plan = next(self.calls), plan_of(count)
            ((_, granted),) = self.ledger.reserve(0, Reserve(call, [0], [ItemRequest(count, 0, 100, 100)]))
            assert isinstance(granted, Granted)
            item, _ = self.ledger.submit(0, Submit(call, 0, plan, "float32"))
            assert item is not None
            self.batcher.put(item, [plan])

    def call(self, *units: int) -> None:
        self.put(*units)
        assert self.batcher.schedule() == []

    def batches(self) -> dict[int, list[int]]:
        """Units of the parts that each engine was told to run last; those without are left out."""
        told = {}
        for device, said in self.said.items():
            landed = {message.part.number: message.part for message in said if isinstance(message, Land)}
            runs = [message.numbers for message in said if isinstance(message, Run)]
            if runs:
                told[device] = [landed[number].plan.tokens for number in runs[-1]]
        return told

    def finish(self, device: int, seconds: float = 0.01) -> None:
        """The device has computed what runs, and its rows are there."""
        engine = self.batcher.engines[device]
        done = Done([PartDone(number, []) for number in engine.running], 0.0, seconds, 0.0)
        while engine.started:
            self.batcher.computed(device)
        self.settle(self.batcher.done(device, done))
        assert self.batcher.schedule() == []

    def settle(self, parts: Sequence[QueuedPart]) -> None:
        self.answered += [part.item.claims[0].call for part in parts]
        for part in parts:
            self.ledger.from_device(part.item, Progress(0, part.plan.tokens, []))
            self.ledger.release(*part.item.claims[0].id)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """Eight engines, whose pace stays as it is."""
    monkeypatch.setattr(balance, "MEMORY", 0.0)
    return Host(8)


def test_cost_is_gemms_by_units_and_attention_by_segments() -> None:
    rows = 4 * LARGE
    assert cost_of(plan_of(LARGE), {"main": 4}) == rows * (1 + rows / SEGMENT_ROWS)
    assert cost_of(plan_of(LARGE, segments=64), {"main": 4}) == rows * (1 + rows / 64 / SEGMENT_ROWS)
    assert cost_of(plan_of(LARGE), {"main": 8}) > 2 * rows


def test_small_items_that_come_together_share_one_replay(host: Host) -> None:
    host.call(*[SMALL] * 3)
    assert host.batches() == {0: [SMALL] * 3}


def test_a_large_call_spreads_over_idle_engines(host: Host) -> None:
    host.call(*[LARGE] * 8)
    assert host.batches() == {device: [LARGE] for device in range(8)}


def test_work_is_shared_evenly_by_cost_and_not_by_count() -> None:
    host = Host(2)
    host.call(LARGE, *[LARGE // 4] * 4)
    assert host.batches() == {0: [LARGE], 1: [LARGE // 4] * 4}


def test_a_batch_is_cut_no_smaller_than_the_floor(host: Host) -> None:
    """32 small items are eight floors of work: every engine has one, none has less."""
    host.call(*[SMALL] * 32)
    batches = host.batches()
    assert sum(map(len, batches.values())) == 32
    assert all(4 * sum(batch) >= FLOOR_ROWS * 0.7 for batch in batches.values())


def test_what_comes_while_all_are_busy_goes_where_the_device_is_free_first(host: Host) -> None:
    for units in [LARGE] * 3 + [LARGE // 2] + [LARGE] * 4:
        host.call(units)
    host.call(SMALL)
    assert [len(engine.open) for engine in host.batcher.engines.values()] == [0, 0, 0, 1, 0, 0, 0, 0]


def test_parts_without_room_wait_for_whichever_engine_takes_its_batch_first() -> None:
    host = Host(2)
    host.call(*[UNITS] * 2)  # run
    host.call(*[UNITS] * 2)  # fill both open batches
    assert [engine.started for engine in host.batcher.engines.values()] == [1, 1]
    host.call(*[UNITS] * 2)  # the same, for full ones are taken ahead
    assert [engine.started for engine in host.batcher.engines.values()] == [2, 2]
    host.call(LARGE)
    assert [len(engine.open) for engine in host.batcher.engines.values()] == [1, 1]
    host.finish(1)
    assert len(host.batcher.engines[1].running) == 1
    assert [part.plan.tokens for part in host.batcher.engines[1].open.values()] == [LARGE]


def test_a_part_without_room_makes_one_device_take_its_batch_ahead() -> None:
    host = Host(2)
    host.call(UNITS)
    host.call(UNITS)
    host.call(LARGE)
    host.call(LARGE)
    engines = host.batcher.engines.values()
    assert [(engine.started, len(engine.open)) for engine in engines] == [(1, 1), (1, 1)]
    host.call(UNITS)  # no open batch has room for it
    assert [(engine.started, len(engine.open)) for engine in engines] == [(2, 1), (1, 1)]
    host.call(SMALL)
    assert [len(engine.open) for engine in engines] == [1, 2], "the other goes on to fill"


def test_a_late_device_gets_nothing_that_others_take_earlier() -> None:
    clock = [1000.0]
    host = Host(3, lambda: clock[0])
    for units in (SMALL, LARGE):
        host.call(units)
    clock[0] += 10.0
    host.call(SMALL)
    engines = host.batcher.engines
    assert [engine.started for engine in engines.values()] == [1, 1, 1], "the idle one, though all seem to be free"
    host.call(SMALL)
    assert [len(engine.open) for engine in engines.values()] == [0, 0, 1], "not where the device is 10 s late"


def test_what_a_device_is_expected_to_take_is_counted_from_its_last_batch() -> None:
    clock = [1000.0]
    host = Host(1, lambda: clock[0])
    host.call(UNITS, UNITS, LARGE)
    engine = host.batcher.engines[0]
    assert [engine.started, len(engine.open)] == [2, 1]
    for now in (1000.001, 1010.0):  # earlier than expected, and later
        clock[0] = now
        host.batcher.computed(0)
        assert engine.free_at == now + sum(engine.predicted)


def test_an_engine_that_does_not_compute_gets_nothing_while_others_do(host: Host) -> None:
    for device in range(1, 8):
        host.batcher.engines[device].works = False
    host.call(LARGE, LARGE)
    assert host.batches() == {0: [LARGE, LARGE]}
    host.batcher.engines[0].works = False
    host.call(LARGE)
    assert host.batches().keys() == {0, 1}, "none computes: it is tried, and finds out"


def test_nothing_more_goes_with_a_batch_of_an_engine_that_does_not_compute() -> None:
    host = Host(2)
    host.call(UNITS, UNITS)
    host.call(LARGE)
    (first,) = (engine for engine in host.batcher.engines.values() if engine.open)
    first.works = False
    host.call(UNITS, UNITS, SMALL)  # the last has room beside the large one alone
    assert host.batches()[first.device] == [LARGE]


def test_parts_of_a_dead_engine_run_on_others_once(host: Host) -> None:
    host.call(*[LARGE] * 8)
    host.call(SMALL)  # waits in an open batch
    waiting = next(engine.device for engine in host.batcher.engines.values() if engine.open)
    assert host.batcher.lose(waiting) == []
    host.batcher.schedule()
    again = [part for engine in host.batcher.engines.values() for part in engine.open.values()]
    assert sorted(part.plan.tokens for part in again) == [SMALL, LARGE]
    assert all(part.retried for part in again)
    device = next(engine.device for engine in host.batcher.engines.values() if engine.open)
    lost = host.batcher.lose(device)
    assert lost
    assert {part.number for part in lost} <= {part.number for part in again}, "what had not been retried is"


def test_a_part_that_could_not_land_leaves_the_batch_as_if_it_had_never_joined() -> None:
    host = Host(1)
    host.call(SMALL)
    host.call(UNITS)
    engine = host.batcher.engines[0]
    (number,) = engine.open
    assert engine.forget(number) is not None
    host.call(SMALL, SMALL)
    assert len(engine.open) == 2
    assert engine.started == 1


def test_nothing_is_retried_where_nobody_is_left() -> None:
    host = Host(1)
    host.call(SMALL)
    (lost,) = host.batcher.lose(0)
    assert lost.plan.tokens == SMALL


def test_engines_may_come_and_go_and_every_item_is_answered_once() -> None:
    host = Host(8)
    units = [SMALL, LARGE, SMALL, UNITS, LARGE // 2] * 40
    failed: list[int] = []
    for index, count in enumerate(units):
        host.call(count)
        if index % 20 == 10:
            for part in host.batcher.lose(index // 20 % 8):  # it was on two that died
                failed.append(part.item.claims[0].call)
                host.ledger.fail(part.item, "GPU_FAULT", "")
                host.ledger.release(*part.item.claims[0].id)
            host.attach(index // 20 % 8)
            host.batcher.schedule()
        if index % 3 == 0:
            host.finish(index % 8)
    while any(engine.running for engine in host.batcher.engines.values()):
        for device in range(8):
            host.finish(device)
    assert sorted(host.answered + failed) == list(range(len(units)))
    assert len(failed) < len(units) // 20
    assert host.ledger.on_device == 0
    assert host.ledger.occupancy().items == 0


def test_the_pace_follows_what_batches_take() -> None:
    pace = Pace()
    for _ in range(30):
        pace.learn(2 * FLOOR_ROWS, 2.0)
    assert pace.time(4 * FLOOR_ROWS) == pytest.approx(4.0, rel=1e-2)
    assert pace.time(1) == pace.time(FLOOR_ROWS)


def test_imbalance_is_the_longest_over_the_mean_busy_time_of_a_minute() -> None:
    imbalance = Imbalance()
    assert imbalance.update({0: 0.0, 1: 0.0}) == 1.0
    assert imbalance.update({0: 3.0, 1: 1.0}) == 1.5
    for _ in range(balance.WINDOW_S):
        imbalance.update({0: 3.0, 1: 1.0})
    assert imbalance.update({0: 4.0, 1: 2.0}) == 1.0
    assert imbalance.update({0: 5.0, 1: 2.0, 2: 0.5}) == pytest.approx(2.0 / (3.5 / 3))


def test_the_rule_of_the_server_beats_those_that_bind_early() -> None:
    hosts = {name: bench.simulate(rule, 4, 0.7, 20, 2.0, seed=1) for name, rule in bench.RULES.items()}
    means = {name: sum(host.latencies) / len(host.latencies) for name, host in hosts.items()}
    assert means["ours"] < 0.9 * min(means["round robin"], means["by count"])
    full = bench.simulate(bench.RULES["ours"], 4, None, 4, 2.0, seed=1)
    assert max(full.busy.values()) < 1.1 * sum(full.busy.values()) / len(full.busy)
    assert max(full.busy.values()) < 1.1 * full.now, "a device computes one batch at a time"
