"""What fails on the device fails alone, and the device is asked whether it is to blame."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Mapping

import pytest
import torch

from fake_tower import FakeTower
from house import House
from opticnerve_server import runner
from opticnerve_server.runner import FAILED, IDLE, NO_MEMORY, UNHEALTHY
from opticnerve_server.sentinel import Sentinel, SentinelFailed
from opticnerve_server.types import Capacity

LARGE = (32, 32)  # 64 units
SMALL = (8, 8)


class SmallTower(FakeTower):
    """Has memory for so many units of its path `main`, and none left while what a failed forward took is still held."""

    most = 1 << 30

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[weakref.ref[torch.Tensor]] = []

    def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        assert not any(block() is not None for block in self.taken), "a failed launch still holds its memory"
        activations = torch.empty(capacity.units)
        if path == "main" and capacity.units > self.most:
            self.taken = [weakref.ref(tensor) for tensor in (activations, *buffers.values())]
            raise torch.OutOfMemoryError("no memory")
        return super().forward(path, buffers, capacity)


@pytest.fixture
def house() -> House:
    return House(SmallTower(), use_graphs=False, cap=512)


def test_a_batch_that_finds_no_memory_is_split_until_it_does(house: House) -> None:
    for _ in range(7):
        house.submit(*LARGE)
    house.tower.most = 128
    house.run_all()
    for call in range(7):
        house.check(call)
    assert house.failed == {}
    assert [len(finished.results) for finished in house.finished] == [2, 2, 1, 2]
    assert house.runner.works
    assert house.told == []
    assert house.ledger.on_device == 0


def test_an_item_without_memory_fails_alone_after_a_second_chance(house: House) -> None:
    for size in (LARGE, (64, 64), SMALL, LARGE):
        house.submit(*size)
    house.tower.most = 128
    house.run_all()
    assert house.failed == {1: NO_MEMORY}
    for call in (0, 2, 3):
        house.check(call)
    assert house.ledger.on_device == 0


def test_an_item_that_was_alone_gets_its_second_chance(house: House) -> None:
    class Once(SmallTower):
        def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
            try:
                return super().forward(path, buffers, capacity)
            except torch.OutOfMemoryError:
                self.most = 1 << 30
                raise

    house = House(Once(), use_graphs=False)
    house.submit(*LARGE)
    house.tower.most = 64 - 1
    house.runner._sentinel.run = lambda: None  # type: ignore[method-assign] # which would take the chance
    house.run_all()
    house.check(0)


class PickyTower(FakeTower):
    """Its forward raises where all pixels of an item are 7, and everywhere while it is broken."""

    broken = False

    def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        self.forwards.append((path, capacity))
        if self.broken or (path == "main" and (buffers["pixels"].view(capacity.units, -1) == 7).all(1).any()):
            raise ValueError("as the test wants it")
        return super().forward(path, buffers, capacity)


@pytest.mark.parametrize("use_graphs", [True, False])
def test_a_poisonous_item_fails_alone(use_graphs: bool) -> None:
    house = House(PickyTower(), use_graphs=use_graphs)
    for call in range(8):
        item = house.submit(*SMALL)
        if call == 5:
            house.pixels(item)[:] = 7
    house.submit(8, 16)
    house.run_all()
    assert house.failed == {5: FAILED}
    for call in {*range(9)} - {5}:
        house.check(call)
    assert house.runner.works
    assert house.ledger.on_device == 0


def test_a_device_that_does_not_compute_is_unhealthy_until_it_does() -> None:
    house = House(PickyTower())
    for _ in range(4):
        house.submit(*SMALL)
    house.tower.broken = True
    batch = house.take()
    house.tower.forwards.clear()
    house.runner.run(batch)
    assert len(house.tower.forwards) == 2, "the batch and the sentinel: nothing is split"
    assert house.failed == dict.fromkeys(range(4), UNHEALTHY)
    house.runner.idle()
    assert house.told == [False]
    house.tower.broken = False
    house.runner.idle()
    assert house.told == [False, True]
    house.submit(*SMALL)
    house.run_all()
    house.check(4)


def test_under_traffic_every_batch_asks_an_unhealthy_device_first() -> None:
    house = House(PickyTower())
    house.tower.broken = True
    for _ in range(2):
        house.submit(*SMALL)
        house.runner.run(house.take())
    assert house.failed == {0: UNHEALTHY, 1: UNHEALTHY}
    house.tower.broken = False
    house.submit(*SMALL)
    house.run_all()
    house.check(2)
    assert house.told == [False, True]


def test_an_idle_device_is_asked_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(PickyTower())
    house.tower.broken = True
    house.runner.idle()
    assert house.told == []
    monkeypatch.setattr(runner, "SENTINEL_S", 0.0)
    house.runner._begin()
    house.runner.idle()
    assert house.told == [], "a busy device is left alone"
    house.runner._end()
    house.runner.idle()
    assert house.told == [False]


def test_the_time_of_a_launch_is_known_while_it_runs(house: House) -> None:
    seen: list[float] = []
    forward = house.tower.forward
    house.tower.forward = lambda *args: (seen.append(house.runner.busy_since), forward(*args))[1]
    before = time.monotonic()
    house.submit(*LARGE)
    house.run_all()
    house.runner._ask_sentinel()
    assert len(seen) > 1
    assert all(before <= began <= time.monotonic() for began in seen)
    assert house.runner.busy_since == IDLE


@pytest.mark.parametrize("wrong", [1.1, float("nan")])
def test_the_sentinel_knows_its_rows(wrong: float) -> None:
    house = House()
    sentinel = Sentinel(house.graphs, house.capacities)
    sentinel.run()
    forward = house.tower.forward
    house.tower.forward = lambda *args: forward(*args) * wrong
    with pytest.raises(SentinelFailed, match="differ"):
        sentinel.run()


def test_a_batch_that_is_split_frees_the_device_once(house: House) -> None:
    """Otherwise the next one would be launched among its halves, into the same landing blocks."""
    freed: list[None] = []
    house.runner._free = lambda: (freed.append(None), house.free())[1]
    for _ in range(4):
        house.submit(*LARGE)
    house.tower.most = 64
    house.run_all()
    assert len(house.finished) == 4
    assert len(freed) == 1


def test_a_batch_that_fails_behind_another_lets_that_end_first() -> None:
    freed: list[None] = []
    house = House(PickyTower())
    house.runner._free = lambda: freed.append(None)
    house.submit(*SMALL)
    house.runner.run(house.take())
    for poison in (False, True):
        item = house.submit(*SMALL)
        if poison:
            house.pixels(item)[:] = 7
    failing = threading.Thread(target=house.runner.run, args=[house.take()])
    failing.start()
    failing.join(0.1)
    assert failing.is_alive()
    house.finish_behind(failing)
    assert house.failed == {2: FAILED}
    for call in (0, 1):
        house.check(call)
    assert len(freed) == 2
    assert house.runner.busy_since == IDLE


@pytest.mark.parametrize("seed", range(6))
def test_whatever_fails_nothing_is_lost_and_nothing_is_wrong(seed: int) -> None:
    chance = random.Random(seed)

    class Moody(FakeTower):
        mood = 0.0

        def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
            if chance.random() < self.mood:
                raise chance.choice((torch.OutOfMemoryError, RuntimeError))("as the test wants it")
            return super().forward(path, buffers, capacity)

    house = House(Moody(), use_graphs=seed % 2 == 0, cap=128)
    house.tower.mood = 0.2
    calls = 60
    for _ in range(calls):
        house.submit(4 * chance.randint(1, 8), 4 * chance.randint(1, 12))
    house.run_all()
    assert not house.rows.keys() & house.failed.keys()
    assert len(house.rows) + len(house.failed) == calls
    assert len(house.rows) > 0
    for call in house.rows:
        house.check(call)
    assert house.ledger.on_device == 0
