"""Waiting parts go with a batch in the padding of its graphs, and nowhere else."""

from __future__ import annotations

from house import House
from opticnerve_server.batcher import LOOKED_AT
from opticnerve_server.types import Capacity

MAIN = [Capacity(units, 32, 64, 128) for units in (32, 48, 64)]


def batches(*shapes: tuple[int, int], use_graphs: bool = True, side: int = 8) -> list[tuple[list[int], list[int]]]:
    """The calls and budgets of each batch that calls of these heights and widths make."""
    house = House(capacities={"main": MAIN, "side": [Capacity(side, 8, 8, 1)]}, use_graphs=use_graphs)
    for shape in shapes:
        house.submit(*shape)
    return told(house)


def told(house: House) -> list[tuple[list[int], list[int]]]:
    """The same of what is queued."""
    house.run_all()
    for call in range(house.calls):
        house.check(call)
    return [
        (
            [house.call_by_number[result.part.work.number] for result in finished.results],
            [run.budget for run in finished.runs],
        )
        for finished in house.finished
    ]


def units(count: int) -> tuple[int, int]:
    """The shape of an image of so many units, at least one, of the path of all."""
    return 4 * count, 4


def test_a_later_part_fills_what_the_graph_computes_in_any_case() -> None:
    assert batches(units(40), units(30), units(8), units(2)) == [([0, 2], [48]), ([1, 3], [32])]


def test_no_part_makes_the_graph_of_another_longer() -> None:
    """Though 50 units would fit the largest."""
    assert batches(units(40), units(30), units(9)) == [([0], [48]), ([1, 2], [48])]


def test_what_does_not_fit_keeps_its_place() -> None:
    assert batches(units(40), units(30), units(31), units(8), units(1)) == [([0, 3], [48]), ([1, 2, 4], [64])]


def test_a_path_that_the_batch_does_not_run_has_no_padding() -> None:
    wide = (4, 8)  # 2 units, and 2 of the path that only wide images have
    assert batches(units(40), units(30), wide) == [([0], [48]), ([1, 2], [32, 8])]
    assert batches((16, 40), units(30), wide) == [([0, 2], [48, 8]), ([1], [32])]
    assert batches((16, 40), units(30), wide, side=3) == [([0], [48, 3]), ([1, 2], [32, 3])]


def test_an_eager_batch_has_no_padding() -> None:
    assert batches(units(40), units(30), units(8), use_graphs=False) == [([0], [0]), ([1, 2], [0])]


def test_only_the_next_are_looked_at() -> None:
    large = [units(33)] * LOOKED_AT
    assert batches(units(40), *large[1:], units(8))[0][0] == [0, LOOKED_AT]
    assert batches(units(40), *large, units(8))[0][0] == [0]


def test_what_one_path_runs_eagerly_is_alone_on_all() -> None:
    """Its pixels may be more than landing blocks hold."""
    wide = (4, 8)
    assert batches(wide, units(1), side=1) == [([0], [32, 0]), ([1], [32])]
    assert batches(units(1), wide, side=1) == [([0], [32]), ([1], [32, 0])]
    assert batches(wide, units(64), units(1), side=1) == [([0], [32, 0]), ([1], [64]), ([2], [32])]


def test_who_comes_later_keeps_a_turn_before_those_that_the_padding_passed_over() -> None:
    house = House(capacities={"main": MAIN, "side": [Capacity(8, 8, 8, 1)]})
    for shape in (units(40), *[units(33)] * 4, units(8)):
        house.submit(*shape, tenant="a")
    house.free()  # two batches are taken, a third lands
    house.submit(*units(33), tenant="b")
    assert [calls for calls, _ in told(house)] == [[0, 5], [1], [2], [6], [3], [4]]
