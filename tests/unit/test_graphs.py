"""Budgets and capacities, the choice of a graph, capture and self-test on the recorder of a machine without CUDA."""

import itertools
from typing import Any

import pytest
import torch

from fake_tower import FakeTower
from opticnerve_server.graphs import (
    Graph,
    GraphManager,
    GraphsFailed,
    budget_levels,
    eager_capacity,
    fits,
    plan_capacities,
    unit_levels,
)
from opticnerve_server.models.base import PathSpec
from opticnerve_server.selftest import sample_parts, self_test
from opticnerve_server.types import Capacity, Launch, Load, Reason

LEVELS = [
    *(64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024),
    *(1152, 1280, 1408, 1536, 1664, 1792, 1920, 2048, 2176, 2304, 2432, 2560),
    *(2816, 3072, 3456, 3840, 4224, 4608, 5120),
]


def manager(tower: FakeTower, **options: object) -> GraphManager:
    settings: dict[str, object] = {"explicit": {}, "cap": 64, "max_items": None, "launch": Launch.ROWS}
    graphs = GraphManager(tower, plan_capacities(tower.planner.paths, **{**settings, **options}))
    with torch.inference_mode():
        graphs.capture(lambda *_: None, on_failure="fail")
    return graphs


def test_automatic_budgets_are_the_36_levels() -> None:
    assert budget_levels(64, 16384, 5120) == LEVELS
    assert len(LEVELS) == 36


@pytest.mark.parametrize("cap", [64, 65, 1000, 5000, 16384])
def test_the_largest_budget_is_always_the_cap(cap: int) -> None:
    levels = budget_levels(64, 16384, cap)
    assert levels[-1] == cap
    assert levels == sorted(set(levels))


def test_no_cap_goes_to_the_largest_item() -> None:
    assert budget_levels(64, 16384, None)[-1] == 16384


def test_padding_between_levels_stays_below_a_fifth() -> None:
    levels = budget_levels(64, 16384, None)
    assert max((high - low) / high for low, high in itertools.pairwise(levels)) <= 0.2


def test_fixed_units_are_exact_up_to_16() -> None:
    assert unit_levels(100, None)[:17] == [*range(1, 17), 20]
    assert unit_levels(100, 5) == [1, 2, 3, 4, 5]


def test_fixed_units_go_to_16_even_where_an_item_is_one() -> None:
    assert unit_levels(1, None) == [*range(1, 17)]
    assert unit_levels(17, None) == [*range(1, 18)]
    assert unit_levels(1, 4) == [1, 2, 3, 4]


@pytest.mark.parametrize("launch", Launch)
def test_budgets_and_caps_in_tokens_come_down_to_whole_tiles(launch: Launch) -> None:
    paths = {"tiles": PathSpec(1, 13, 1025, fixed_units=True, tokens_per_unit=256)}
    options: dict[str, Any] = {"max_items": None, "launch": launch}
    planned = plan_capacities(paths, explicit={}, cap=1024, **options)["tiles"]
    assert planned == [Capacity(n, n, n, 1025) for n in (1, 2, 3, 4)]
    assert plan_capacities(paths, explicit={}, cap=1279, **options)["tiles"] == planned
    assert len(plan_capacities(paths, explicit={}, cap=5120, **options)["tiles"]) == 16
    explicit = plan_capacities(paths, explicit={"tiles": (300, 256, 1024)}, cap=None, **options)["tiles"]
    assert [capacity.units for capacity in explicit] == [1, 4]
    bad: dict[str, Any]
    for bad in ({"explicit": {"": (255,)}, "cap": None}, {"explicit": {}, "cap": 255}):
        with pytest.raises(ValueError, match="is 255, but path tiles runs whole tiles of 256 tokens: use at least"):
            plan_capacities(paths, **bad, **options)


def test_explicit_budgets_replace_automatic_ones_by_path() -> None:
    paths = {"a": PathSpec(64, 4096, 4), "b": PathSpec(64, 4096, 4)}
    options = {"cap": 128, "max_items": None, "launch": Launch.ROWS}
    planned = plan_capacities(paths, explicit={"a": (512, 1024)}, **options)
    assert [capacity.units for capacity in planned["a"]] == [512, 1024]
    assert [capacity.units for capacity in planned["b"]] == [64, 80, 96, 112, 128]
    every = plan_capacities(paths, explicit={"": (256,)}, **options)
    assert [capacity.units for capacity in every["b"]] == [256]
    with pytest.raises(ValueError, match="path c; this model has a, b"):
        plan_capacities(paths, explicit={"c": (64,)}, **options)


def test_items_default_to_largest_by_smallest_and_never_exceed_units() -> None:
    planned = plan_capacities({"a": PathSpec(64, 16384, 4)}, explicit={}, cap=5120, max_items=None, launch=Launch.ROWS)[
        "a"
    ]
    assert planned[-1].items == 80
    assert planned[0].items == 64
    pinned = plan_capacities(
        {"a": PathSpec(64, 16384, 4)}, explicit={"": (1024,)}, cap=None, max_items=None, launch=Launch.ROWS
    )["a"]
    assert [capacity.items for capacity in pinned] == [16]


@pytest.mark.parametrize(("launch", "longest"), [(Launch.TILES, 2560), (Launch.SEGMENTS, 20480)])
def test_two_classes_where_the_launch_costs_segments(launch: Launch, longest: int) -> None:
    planned = plan_capacities({"a": PathSpec(64, 16384, 4)}, explicit={}, cap=5120, max_items=None, launch=launch)["a"]
    few, many = (capacity for capacity in planned if capacity.units == 5120)
    assert few == Capacity(5120, 8, 8, 20480)
    assert many == Capacity(5120, 80, 80, longest)


def test_many_images_beside_a_large_one_need_no_larger_budget_where_length_costs_nothing() -> None:
    """One image of 1024 tokens and 20 of 64."""
    load = Load(units=2304, items=21, segments=21, longest=4096)
    budgets = {}
    for launch in Launch:
        chosen = fits(
            plan_capacities({"a": PathSpec(64, 16384, 4)}, explicit={}, cap=None, max_items=None, launch=launch)["a"],
            load,
        )
        assert isinstance(chosen, Capacity)
        budgets[launch] = chosen.units
    assert budgets[Launch.ROWS] == budgets[Launch.SEGMENTS] == 2304
    assert budgets[Launch.TILES] > 8000


def test_fits_takes_the_smallest_and_says_why_not() -> None:
    few, many = Capacity(100, 2, 2, 400), Capacity(100, 10, 10, 50)
    capacities = [Capacity(50, 2, 2, 200), few, many]
    assert fits(capacities, Load(40, 1, 1, 160)) == capacities[0]
    assert fits(capacities, Load(60, 1, 1, 240)) == few
    assert fits(capacities, Load(60, 5, 5, 50)) == many
    assert fits(capacities, Load(101, 1, 1, 10)) is Reason.TOO_MANY_TOKENS
    assert fits(capacities, Load(60, 11, 11, 10)) is Reason.TOO_MANY_ITEMS
    assert fits(capacities, Load(60, 1, 11, 10)) is Reason.TOO_MANY_SEGMENTS
    assert fits(capacities, Load(60, 5, 5, 51)) is Reason.TOO_MANY_SEGMENTS
    assert fits(capacities, Load(60, 1, 1, 401)) is Reason.SEGMENT_TOO_LONG
    assert fits([], Load(1, 1, 1, 1)) is Reason.NOT_CAPTURED


def test_an_eager_forward_is_rounded_up_to_128_rows() -> None:
    assert eager_capacity(PathSpec(64, 4096, 4), Load(33, 2, 3, 77)) == Capacity(64, 2, 3, 77)
    assert eager_capacity(PathSpec(1, 16, 1025, fixed_units=True), Load(3, 1, 3, 1025)).units == 3


def test_capture_goes_down_from_the_largest_and_the_choice_goes_up() -> None:
    tower = FakeTower()
    graphs = manager(tower)
    sizes = [capacity.units for path, capacity in tower.forwards if path == "main"]
    assert sizes == sorted(sizes, reverse=True)
    assert graphs.paths["side"].budgets == [*range(1, 17)]
    graph = graphs.choose("main", Load(17, 1, 1, 34))
    assert isinstance(graph, Graph)
    assert graph.capacity.units == 20


def test_two_thousand_sizes_take_no_graph_that_was_not_there_at_the_start() -> None:
    tower = FakeTower()
    graphs = manager(tower, cap=256)
    captured, forwards = dict(graphs.paths["main"].graphs), len(tower.forwards)
    chosen = [graphs.choose("main", Load(units, 1, 1, 2 * units)) for units in range(1, 2001)]
    hits = [graph for graph in chosen if isinstance(graph, Graph)]
    assert len(hits) == 256
    assert all(graph is captured[graph.capacity] for graph in hits)
    assert chosen[256:] == [Reason.TOO_MANY_TOKENS] * 1744
    assert graphs.paths["main"].graphs == captured
    assert len(tower.forwards) == forwards


def test_the_self_test_tries_every_graph() -> None:
    graphs = manager(FakeTower(bands=3))
    tried: list[tuple[str, int]] = []
    self_test(graphs, lambda path, capacity: tried.append((path, capacity.units)))
    assert [units for path, units in tried if path == "main"] == graphs.paths["main"].budgets
    assert ("side", 16) in tried


def test_samples_fill_a_capacity() -> None:
    planner = FakeTower().planner
    parts = sample_parts(planner, "main", Capacity(256, 4, 4, 512))
    assert sum(part.paths["main"].units for part in parts) > 128


def test_samples_of_a_capacity_of_many_segments_are_many_beside_a_long_one() -> None:
    parts = sample_parts(FakeTower().planner, "main", Capacity(256, 40, 40, 512))
    assert [part.paths["main"].longest for part in parts] == [256, *[2] * 39]


class LeakyTower(FakeTower):
    """Its mean takes in rows behind the last segment."""

    def forward(self, path, buffers, capacity):
        lines = super().forward(path, buffers, capacity)
        return lines + buffers["pixels"].float().mean() if path == "main" else lines


class ForgetfulTower(FakeTower):
    """Its result depends on what ran before."""

    calls = 0

    def forward(self, path, buffers, capacity):
        self.calls += 1
        return super().forward(path, buffers, capacity) + self.calls


class NanTower(FakeTower):
    def forward(self, path, buffers, capacity):
        return super().forward(path, buffers, capacity) * float("nan")


@pytest.mark.parametrize(
    ("tower", "text"),
    [(LeakyTower(), "differs from the eager"), (ForgetfulTower(), "not bit-equal"), (NanTower(), "NaN or infinity")],
)
def test_the_self_test_refuses_a_wrong_tower(tower: FakeTower, text: str) -> None:
    graphs = manager(tower, cap=256)
    with pytest.raises(GraphsFailed, match=text):
        self_test(graphs, lambda path, capacity: None)


class FailingTower(FakeTower):
    def forward(self, path, buffers, capacity):
        if capacity.units == 16:
            raise RuntimeError("no kernel for 16")
        return super().forward(path, buffers, capacity)


def test_a_failed_capture_stops_or_leaves_a_gap() -> None:
    tower = FailingTower()
    planned = plan_capacities(tower.planner.paths, explicit={}, cap=20, max_items=None, launch=Launch.ROWS)
    with pytest.raises(GraphsFailed, match=r"path main at 16 units .* --on-capture-failure eager"):
        GraphManager(tower, planned).capture(lambda *_: None, on_failure="fail")
    graphs = GraphManager(tower, planned)
    graphs.capture(lambda *_: None, on_failure="eager")
    assert 16 not in graphs.paths["main"].budgets
    graph = graphs.choose("main", Load(16, 1, 1, 32))
    assert isinstance(graph, Graph)
    assert graph.capacity.units == 20
