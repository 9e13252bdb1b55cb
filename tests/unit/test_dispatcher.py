"""Batches through batcher, dispatcher and graphs into slots, on the two-path tower that numpy computes too."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from fake_tower import FakeTower
from house import House
from opticnerve_server.bench.inprocess import path_states
from opticnerve_server.dispatcher import Finished
from opticnerve_server.messages import ItemRequest, Reserve, Submit
from opticnerve_server.models.base import ImageItem
from opticnerve_server.parts import Failure, Part
from opticnerve_server.types import Capacity, Outcome, Reason


def outcomes(finished: Finished) -> dict[str, Outcome]:
    return {run.path: run.outcome for run in finished.runs}


def test_rows_equal_numpy_in_any_mix() -> None:
    house = House()
    for height, width in [(4, 4), (8, 16), (16, 8), (12, 12), (4, 64), (32, 32), (8, 8), (4, 4), (20, 24)]:
        house.submit(height, width)
    house.run_all()
    for call in range(house.calls):
        house.check(call)


def test_the_time_to_launch_a_batch_is_told() -> None:
    house = House()
    house.submit(8, 16)
    forward = house.tower.forward

    def slow(*arguments):
        time.sleep(0.02)
        return forward(*arguments)

    house.tower.forward = slow  # type: ignore[method-assign]
    started = time.monotonic()
    house.run_all()
    assert 0.04 <= house.finished[0].host_s <= time.monotonic() - started, "two paths, and all else that it does"


def test_a_batch_is_as_full_as_its_largest_graph() -> None:
    house = House()
    for _ in range(10):
        house.submit(8, 8)  # 4 units, 10 items: at most 8 in a batch
    house.run_all()
    assert [len(finished.results) for finished in house.finished] == [8, 2]
    assert [run.budget for finished in house.finished for run in finished.runs] == [32, 8]


def test_full_batches_are_given_to_the_device_one_ahead() -> None:
    house = House()
    for _ in range(5):
        house.submit(32, 32)  # 64 units: alone in its batch
    house.free()
    assert house.engine.started == 2
    assert house.engine.free_at > time.monotonic(), "and the third is expected to start behind both"
    assert [len(house.engine.running), len(house.engine.open)] == [2, 1]
    house.run_all()
    assert len(house.finished) == 5
    for call in range(5):
        house.check(call)


def test_a_third_batch_waits_until_the_rows_of_the_first_are_out() -> None:
    house = House()
    for _ in range(2):
        house.submit(8, 8)
        house.dispatcher.run(house.take())
    house.submit(8, 8)
    third = threading.Thread(target=house.dispatcher.run, args=[house.take()])
    third.start()
    third.join(0.1)
    assert third.is_alive()
    house.finish_behind(third)
    for call in range(3):
        house.check(call)


def test_a_path_without_work_is_skipped() -> None:
    house = House()
    house.submit(16, 8)
    house.run_all()
    assert outcomes(house.finished[0]) == {"main": Outcome.HIT}
    assert {path for path, _ in house.tower.forwards} == {"main"}


def test_one_path_hits_while_the_other_goes_eager() -> None:
    house = House(capacities={"main": [Capacity(64, 8, 64, 128)], "side": [Capacity(1, 1, 1, 1)]})
    house.submit(8, 16)
    house.run_all()
    assert outcomes(house.finished[0]) == {"main": Outcome.HIT, "side": Outcome.MISS}
    house.check(0)


def test_an_item_over_the_largest_graph_runs_alone_and_eagerly() -> None:
    house = House()
    house.submit(8, 8)
    house.submit(40, 32)
    house.submit(8, 8)
    house.run_all()
    assert [len(finished.results) for finished in house.finished] == [1, 1, 1]
    big = house.finished[1].runs[0]
    assert (big.outcome, big.reason, big.budget) == (Outcome.MISS, Reason.TOO_MANY_TOKENS, 0)
    assert [path for path, _ in house.tower.forwards].count("main") == 3
    for call in range(3):
        house.check(call)


@pytest.mark.parametrize(
    ("capacity", "reason"),
    [
        (Capacity(64, 8, 2, 128), Reason.TOO_MANY_SEGMENTS),
        (Capacity(64, 8, 64, 4), Reason.SEGMENT_TOO_LONG),
        (Capacity(64, 1, 64, 128), Reason.TOO_MANY_ITEMS),
    ],
)
def test_a_batch_beyond_every_graph_is_exactly_one_eager_forward(capacity: Capacity, reason: Reason) -> None:
    house = House(FakeTower(bands=3), capacities={"main": [capacity], "side": [Capacity(2, 8, 8, 1)]})
    for _ in range(2):
        house.submit(16, 8)
    boundless = [Capacity(1 << 20, 1 << 20, 1 << 20, 1 << 20)]
    house.engine.paths = path_states(house.tower.planner, {"main": boundless, "side": boundless}, use_graphs=True)
    house.dispatcher.run(house.take())
    house.dispatcher.stop()
    house.dispatcher.finish_forever()
    (run,) = house.finished[0].runs
    assert (run.outcome, run.reason) == (Outcome.MISS, reason)
    assert len(house.tower.forwards) == 1
    house.check(0)
    house.check(1)


def test_without_graphs_every_dispatch_is_a_miss() -> None:
    house = House(use_graphs=False)
    house.submit(8, 16)
    house.run_all()
    assert {run.reason for run in house.finished[0].runs} == {Reason.DISABLED}
    house.check(0)


def test_expired_and_released_items_are_dropped_when_the_batch_is_taken() -> None:
    house = House()
    house.submit(8, 8)
    house.submit(12, 12, deadline=time.monotonic() + 0.05)
    gone = house.submit(8, 12)
    house.submit(8, 16)
    house.fill()
    assert len(house.engine.open) == 4
    house.ledger.release(0, house.call_of[gone], 0)
    time.sleep(0.06)
    batch = house.take()
    assert house.calls_of(batch) == [0, 3]
    assert [house.call_of[part.item] for part in house.dropped] == [1, 2]
    house.dispatcher.run(batch)
    house.dispatcher.stop()
    house.dispatcher.finish_forever()
    house.check(0)
    house.check(3)


def test_earlier_calls_go_first_whenever_their_pixels_are_ready() -> None:
    house = House()
    requests = []
    plan = house.tower.planner.plan(ImageItem(32, 32))
    for call in (0, 1):
        message = Reserve(call, [0], [ItemRequest(plan.tokens, 0, plan.pixel_bytes, plan.tokens * 8)])
        requests.append(house.ledger.reserve(0, message))
    for call in (1, 0):
        item, _ = house.ledger.submit(0, Submit(call, 0, plan, "float32"))
        assert item is not None
        house.call_of[item] = call
        house.put(item)
    assert house.calls_of(house.take()) == [0]


def test_float16_rows_that_overflow_fail_alone() -> None:
    house = House()
    bright = house.submit(4, 4, dtype="float16")
    house.pixels(bright)[:] = 1  # 48 bytes of 1: small sums
    house.media[0] = np.ones((4, 4, 3), np.uint8)
    house.submit(128, 4, dtype="float16")  # wide sums stay below 65504 on main: no failure expected there
    house.submit(4, 512, dtype="float16")  # the side path sums all bytes: far over the range
    house.submit(4, 512)
    house.run_all()
    failures = house.failures()
    assert failures[0] is None
    assert failures[1] is None
    assert failures[3] is None
    assert failures[2] is not None
    assert isinstance(failures[2], Failure)
    assert failures[2][0] == "NON_FINITE_OUTPUT"
    assert "float16" in failures[2][1]


class SickTower(FakeTower):
    """Returns NaN for the item whose pixels are all 7."""

    def forward(self, path, buffers, capacity):
        lines = super().forward(path, buffers, capacity)
        if path == "main":
            sick = (buffers["pixels"].view(capacity.units, -1) == 7).all(1)
            lines[sick] = float("nan")
        return lines


def test_nan_rows_fail_their_item_and_no_later_one() -> None:
    house = House(SickTower())
    for _ in range(3):
        sick = house.submit(16, 16)
        house.pixels(sick)[:] = 7
        house.submit(8, 8)
        house.submit(12, 8)
    house.run_all()
    assert {call for call, failure in house.failures().items() if failure} == {0, 3, 6}
    for call in {1, 2, 4, 5, 7, 8}:
        house.check(call)


def test_a_batch_that_lost_all_its_parts_leaves_no_pixels_behind() -> None:
    """Its landing block must be open again, or the next batch runs out of it."""
    house = House()
    for _ in range(5):
        big = house.submit(40, 32)  # larger than every graph: it has a landing block of its own
        house.fill()
        house.ledger.release(0, house.call_of[big], 0)
        batch = house.take()
        assert batch.parts == []
        assert [part.item for part in house.dropped] == [big]
        house.dropped.clear()
        house.ledger.fail(big, "EXPIRED_IN_QUEUE", "")
        house.dispatcher.run(batch)
    calls = [house.call_of[house.submit(32, 32)] for _ in range(2)]
    house.run_all()
    for call in calls:
        house.check(call)
    assert house.ledger.on_device == 0


def test_a_part_that_could_not_land_is_dropped() -> None:
    house = House()
    house.submit(8, 8)
    house.submit(8, 12)
    failure = Failure("GPU_MEMORY", "no memory", 1.0)

    def land(part: Part) -> int:
        if house.call_by_number[part.work.number] == 0:
            part.failure = failure
            return 0
        return house.dispatcher.land(part)

    house.runner.land = land  # type: ignore[method-assign]
    batch = house.take()
    assert house.failed == {0: failure}
    assert house.calls_of(batch) == [1]
    house.dispatcher.run(batch)
    house.dispatcher.stop()
    house.dispatcher.finish_forever()
    house.check(1)


class StarvedTower(FakeTower):
    """Its next forward finds no memory."""

    starved = False

    def forward(self, path, buffers, capacity):
        if self.starved:
            self.starved = False
            raise torch.OutOfMemoryError("no memory")
        return super().forward(path, buffers, capacity)


def test_a_batch_whose_launch_failed_can_be_run_again() -> None:
    house = House(StarvedTower(), use_graphs=False)
    house.submit(8, 8)
    house.submit(8, 16)
    batch = house.take()
    house.tower.starved = True
    with pytest.raises(torch.OutOfMemoryError):
        house.dispatcher.run(batch)
    house.dispatcher.run(batch)
    house.submit(12, 12)
    house.run_all()
    for call in range(3):
        house.check(call)


def test_a_discarded_batch_leaves_the_next_one_unharmed() -> None:
    house = House(StarvedTower(), use_graphs=False)
    house.submit(8, 8)
    house.tower.starved = True
    with pytest.raises(torch.OutOfMemoryError):
        house.dispatcher.run(house.take())
    house.dispatcher.discard()
    house.engine.take()
    house.engine.running.clear()
    house.free()
    house.submit(12, 12)
    house.run_all()
    house.check(1)
