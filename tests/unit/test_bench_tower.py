"""The policies of dispatch that a bench compares, how it keeps a tower full, and what its command prints."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_tower import FakeTower
from opticnerve_server import cli
from opticnerve_server.attention.sdpa import Sdpa
from opticnerve_server.bench import backends, batches, saturation, tables
from opticnerve_server.bench.build import Built, capture
from opticnerve_server.bench.calls import engine_of, measure, place
from opticnerve_server.bench.policies import Policy, doubled, eager, greedy, greedy_capacities, most_images
from opticnerve_server.bench.recorder import Heard
from opticnerve_server.dispatcher import Finished
from opticnerve_server.graphs import fits, plan_capacities
from opticnerve_server.models import registry
from opticnerve_server.models.base import ImageItem
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.types import Capacity, ItemPlan, Launch, Load

CAP = 64


class LaunchesTiles(Sdpa):
    """Plans two classes a budget, as most backends of CUDA do."""

    launch = Launch.TILES


def fake(attention: Sdpa) -> tuple[Built, Policy]:
    """The tower of two paths and the policy of a server."""
    tower = FakeTower()
    paths = tower.planner.paths
    tower.planner.paths = {"main": paths["main"], "side": replace(paths["side"], min_units=4)}
    built = Built(tower, Heard(attention), None, None)  # type: ignore[arg-type]
    with torch.inference_mode():
        graphs, capacities = capture(built, CAP)
    return built, Policy("ours", graphs, capacities, use_graphs=True)


def images(built: Built, seed: int) -> list[ItemPlan]:
    draw = random.Random(seed)
    sides = [(4 * draw.randint(1, 5), 4 * draw.randint(1, 5)) for _ in range(draw.randint(1, 12))]
    return [built.tower.planner.plan(ImageItem(*each)) for each in sides]


def packed(plans: Sequence[ItemPlan], tops: dict[str, int], most: int) -> list[list[ItemPlan]]:
    """The published rule of greedy packing, written down once more: by sizes, closing what the next does not fit."""
    closed: list[list[ItemPlan]] = []
    current: list[ItemPlan] = []
    used = dict.fromkeys(tops, 0)
    for plan in sorted(plans, key=lambda plan: plan.tokens):
        more = {path: used[path] + plan.paths[path].units for path in tops}
        if current and (len(current) >= most or any(more[path] > top for path, top in tops.items())):
            closed.append(current)
            current, more = [], {path: plan.paths[path].units for path in tops}
        current.append(plan)
        used = more
    return [*closed, current]


def plans_of(finished: Finished) -> list[ItemPlan]:
    return [result.part.plan for result in finished.results]


def test_greedy_budgets_double_up_to_the_largest() -> None:
    assert doubled(64, 5120) == [64, 128, 256, 512, 1024, 2048, 4096, 5120]
    assert doubled(64, 4096) == [64, 128, 256, 512, 1024, 2048, 4096]
    assert doubled(64, 64) == [64]
    for model, most in (("qwen3-vl-8b", 64), ("qwen2.5-vl-7b", 64), ("deepseek-ocr", 5120 // 100)):
        paths = registry.build_planner(registry.open_model(f"preset:{model}", "dummy")).paths
        assert most_images(paths, 5120) == most


def test_segments_never_keep_a_greedy_batch_from_its_budget() -> None:
    paths = registry.build_planner(registry.open_model("preset:qwen3-vl-8b", "dummy")).paths
    ours = plan_capacities(paths, explicit={}, cap=5120, max_items=None, launch=Launch.TILES)
    capacities = greedy_capacities(paths, ours, 5120, launch=Launch.TILES)["default"]
    assert sorted({capacity.units for capacity in capacities}) == doubled(64, 5120)
    for units in doubled(64, 5120):
        anything = Load(units, items=64, segments=64, longest=4 * units)
        chosen = fits(capacities, anything)
        assert isinstance(chosen, Capacity)
        assert chosen.units == units
        few = fits(capacities, Load(units, items=1, segments=1, longest=4 * units))
        assert isinstance(few, Capacity)
        assert (few.units, few.segments) == (units, 8)  # as ours has it


@pytest.mark.parametrize("attention", [Sdpa(), LaunchesTiles()])
def test_greedy_packs_as_published_and_runs_the_smallest_budget(attention: Sdpa) -> None:
    built, ours = fake(attention)
    with torch.inference_mode():
        policy = greedy(built, ours.capacities, CAP)
    tops = {path: capacities[-1].units for path, capacities in ours.capacities.items()}
    assert tops == {"main": CAP, "side": 16}
    levels = {"main": [4, 8, 16, 32, 64], "side": [4, 8, 16]}
    most = most_images(built.tower.planner.paths, CAP)
    assert most == 4
    dispatches = 0
    with engine_of(built.tower, policy) as engine:
        for seed in range(12):
            plans = images(built, seed)
            items = place(engine, policy, plans)
            engine.forget()
            engine.run(items)
            expected = packed(plans, tops, most)
            assert [plans_of(batch) for batch in engine.batches] == expected
            for batch, parts in zip(engine.batches, expected, strict=True):
                used = {path: sum(part.paths[path].units for part in parts) for path in tops}
                fit = {path: min(b for b in levels[path] if b >= units) for path, units in used.items() if units}
                assert {run.path: run.budget for run in batch.runs} == fit
                dispatches += len(fit)
            engine.free(items)
    assert dispatches > 40


def test_every_policy_runs_all_images_eager_in_their_order_and_none_changes_a_row() -> None:
    built, ours = fake(Sdpa())
    calls = [images(built, seed) for seed in range(8)]
    with torch.inference_mode():
        policies = [ours, greedy(built, ours.capacities, CAP), eager(ours.graphs, calls)]
    rows: dict[str, torch.Tensor] = {}
    for policy in policies:
        with engine_of(built.tower, policy) as engine:
            for plans in calls:
                items = place(engine, ours, plans)  # in one order, for the same pixels
                engine.forget()
                engine.run(items)
                ran = [plan for batch in engine.batches for plan in plans_of(batch)]
                assert Counter(map(id, ran)) == Counter(map(id, plans))
                if policy.name == "eager":
                    assert ran == plans
                    assert [{run.budget for run in batch.runs} for batch in engine.batches] == [{0}]
                call = torch.cat([engine.rows(item) for item in items])
                rows[policy.name] = torch.cat([rows.get(policy.name, call[:0]), call])
                engine.free(items)
    assert len(rows["ours"]) == sum(plan.tokens for plans in calls for plan in plans)
    assert torch.equal(rows["ours"], rows["greedy"])
    assert torch.equal(rows["ours"], rows["eager"])


def test_a_call_without_its_copies_is_timed_from_landed_pixels_to_computed_rows() -> None:
    built, ours = fake(Sdpa())
    plans = [built.tower.planner.plan(ImageItem(32, 16))] * 3  # of 32 units: two batches
    with engine_of(built.tower, ours) as engine:
        items = place(engine, ours, plans)
        for landed_first in (True, False):
            times = measure(engine, items, 3, landed_first=landed_first)
            assert times["budgets"] == [64, 32]
            assert 0 < times["median"] <= times["p99"]
            assert len(engine.given_at) == len(engine.computed_at) == 2
            assert all(given < computed for given, computed in zip(engine.given_at, engine.computed_at, strict=True))
        engine.free(items)


def test_a_saturated_tower_gets_every_call_again_until_its_time_is_over() -> None:
    built, ours = fake(Sdpa())
    plans = [built.tower.planner.plan(ImageItem(16, 16))] * 2
    with engine_of(built.tower, ours) as engine:
        calls = [place(engine, ours, plans) for _ in range(5)]
        rate = saturation.run(engine, calls, 0.3)
        done = [part for batch in engine.batches for part in plans_of(batch)]
        assert len(done) % len(plans) == 0
        assert len(done) >= 10 * 2  # every call more than once
        assert 0 < rate <= len(done) / (0.3 * (1 - saturation.WARM_SHARE))
        for items in calls:
            engine.free(items)  # nothing is left on the device
    with torch.inference_mode():
        host = saturation.host_time(built, 0.2, 2)
    assert min(host.launch_ms, host.period_ms, host.replay_ms) > 0
    assert host.between_ms == host.period_ms - host.replay_ms


def test_random_batches_are_the_same_each_time_and_within_their_bounds() -> None:
    first = batches.random_batches(24)
    assert first == batches.random_batches(24)
    assert first != batches.random_batches(24, seed=1)
    assert {len(media) for media in first.values()} <= set(range(1, batches.MOST_IMAGES + 1))
    sides = [side for media in first.values() for each in media for side in (each.height, each.width)]
    assert min(sides) >= batches.SIDES[0]
    assert max(sides) <= batches.SIDES[1]
    assert sum(side < 549 for side in sides) / len(sides) == pytest.approx(0.5, abs=0.06)  # sqrt(224 x 1344)


def test_the_table_says_how_much_faster_ours_is() -> None:
    def row(batch: str, tokens: int, ours: float, greedy: float, eager: float) -> dict[str, Any]:
        each = {"ours": ours, "greedy": greedy, "eager": eager}
        times = {name: {"median": ms, "mean": ms, "p99": ms, "budgets": [tokens]} for name, ms in each.items()}
        return {"batch": batch, "tokens": tokens, **times}

    rows = [row("1x336", 100, 2, 3, 8), row("8x672", 3528, 20, 30, 10), row("random0", 5000, 1, 2, 4)]
    rows[0] |= {"replay_ms": 1.5, "ceiling_ms": 1.2}
    about = {"model": "m", "device": "d", "torch": "t", "dtype": "x", "attention": "a", "kernels": "k", "graphs": 1}
    about |= {"graph_mib": 2, "capture_s": 3.0, "load_s": 4.0, "selftest_s": 5.0}
    said = tables.tower_markdown({**about, "rows": rows})
    assert "| 1x336 | 100 | 100 | 2.000 (2.000, 2.000) | 3.000 (3.000, 3.000) |" in said
    assert "| 1.500 | 1.200 | 1.250 |" in said
    assert "ours is 1.500 times as fast as greedy over 2 batches" in said
    assert "ours is 1.414 times as fast as eager over 2 batches" in said  # sqrt(4 x 1/2)
    assert "ours is 2.000 times as fast as greedy over 1 random ones" in said
    assert "50% of the batches have more than 2560 tokens" in said
    assert "100% of the random batches" in said


def test_the_commands_measure_a_model_and_name_the_backends_that_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint("qwen2_5_vl", tmp_path / "tiny")
    monkeypatch.setattr(batches, "SIDES", (56, 112))
    monkeypatch.setattr(backends, "SHOWN", ("1x224",))
    monkeypatch.setattr(saturation, "IMAGE", ImageItem(56, 56))
    figures, drawn = tmp_path / "tower.json", tmp_path / "tower.png"
    model = ["--model", str(tmp_path / "tiny"), "--device", "cpu", "--dtype", "float32", "--repeats", "1"]
    few = ["--max-token-budget", "64", "--batches", "1x224", "--random", "1", "--seconds", "0.1"]
    assert cli.main(["bench", "tower", *model, *few, "--json", str(figures)]) == 0
    table = capsys.readouterr().out
    measured = json.loads(figures.read_text())
    assert [row["batch"] for row in measured["rows"]] == ["1x224", "random0"]
    assert measured["rows"][0]["ceiling_ms"] > 0
    assert {"ours", "greedy", "eager"} <= set(measured["rows"][1])
    assert "slots" not in measured["rows"][1]
    assert set(measured["images_s"]) == {"1", "8"}
    assert cli.main(["bench", "tower", "--from", str(figures), "--plot", str(drawn)]) == 0
    assert capsys.readouterr().out in table
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["bench", "tower", *model, "--attention-backends", "sdpa", "flashinfer"]) == 0
    said = capsys.readouterr().out
    assert "| sdpa | " in said
    assert "\nflashinfer: attention backend flashinfer cannot run here: they need a CUDA device" in said
