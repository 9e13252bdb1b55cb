"""A clip larger than every graph runs as several full replays, whose rows are those of one eager forward."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from opticnerve_server.bench.inprocess import InProcessEngine
from opticnerve_server.budgets import holds
from opticnerve_server.graphs import GraphManager, plan_capacities
from opticnerve_server.models.base import VideoItem
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.grid import GridPlanner
from opticnerve_server.types import Capacity, ItemPlan, Launch, Load, Outcome, PathPlan, Span
from towers import load_tower


def clip(frames: int, h: int, w: int, patch: int = 16) -> ItemPlan:
    """The plan of a clip of h x w patches."""
    groups, tokens = -(-frames // 2), h * w // 4
    return ItemPlan(
        kind="video",
        height=h * patch,
        width=w * patch,
        grid=(groups, h, w),
        merge=2,
        tokens=groups * tokens,
        paths={"default": PathPlan(groups * tokens, groups, h * w, frames * h * w * patch**2 * 3)},
        spans=tuple(Span("frame", tokens, timestamp=float(i)) for i in range(groups)),
    )


def planner() -> GridPlanner:
    from opticnerve_server.models import registry

    planner = registry.build_planner(registry.open_model("preset:qwen3-vl-2b", "dummy"))
    assert isinstance(planner, GridPlanner)
    return planner


def takes(capacity: Capacity):
    return lambda plan: holds(capacity, Load.of([plan.paths["default"]]))


@pytest.mark.parametrize("frames", [1, 2, 9, 10, 129, 130])
@pytest.mark.parametrize("capacity", [Capacity(64, 8, 64, 256), Capacity(512, 8, 7, 64), Capacity(6, 1, 1, 24)])
def test_parts_are_full_and_cover_the_clip_in_order(frames: int, capacity: Capacity) -> None:
    whole = clip(frames, 4, 6)
    parts = planner().split(whole, takes(capacity))
    assert all(takes(capacity)(part) for part in parts)
    assert sum(part.tokens for part in parts) == whole.tokens
    assert sum(part.pixel_bytes for part in parts) == whole.pixel_bytes
    assert sum((part.spans for part in parts), ()) == whole.spans
    most = min(capacity.units // 6, capacity.segments)
    assert [part.grid[0] for part in parts[:-1]] == [most] * (len(parts) - 1)


def test_what_fits_or_cannot_be_cut_stays_whole() -> None:
    for whole in (clip(8, 4, 6), clip(2, 40, 40)):
        assert planner().split(whole, takes(Capacity(64, 8, 64, 256))) == [whole]
    frames_too_large = clip(8, 40, 40)
    assert planner().split(frames_too_large, takes(Capacity(64, 8, 64, 256))) == [frames_too_large]


@pytest.mark.parametrize("architecture", ["qwen3_vl", "qwen2_5_vl"])
def test_rows_equal_one_eager_forward(architecture: str, tmp_path: Path) -> None:
    write_checkpoint(architecture, tmp_path, 0)
    tower = load_tower(tmp_path)
    patch = tower.planner.patch
    plans = [clip(23, 6, 8, patch), clip(1, 8, 8, patch), clip(48, 4, 4, patch)]
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 256, plan.pixel_bytes, dtype=np.uint8) for plan in plans]

    def rows(use_graphs: bool, cap: int) -> tuple[list[torch.Tensor], InProcessEngine]:
        capacities = plan_capacities(
            tower.planner.paths, explicit={"": (cap,)}, cap=None, max_items=None, launch=Launch.ROWS
        )
        graphs = GraphManager(tower, capacities)
        with torch.inference_mode():
            graphs.capture(lambda *_: None, on_failure="fail")
        with InProcessEngine(tower, graphs, capacities, use_graphs=use_graphs, slot_bytes=64 << 20) as engine:
            items = engine.place(plans, pixels, "float32")
            engine.run(items)
            result = [engine.rows(item) for item in items]
            engine.free(items)
            assert engine.ledger.occupancy().items == 0
        return result, engine

    whole, eager = rows(use_graphs=False, cap=512)
    parts, replayed = rows(use_graphs=True, cap=50)
    assert len(eager.batches) == 1
    assert {run.outcome for batch in replayed.batches for run in batch.runs} == {Outcome.HIT}
    assert len(replayed.batches) >= 6
    for mine, reference in zip(parts, whole, strict=True):
        assert (mine - reference).norm() <= 1e-5 * reference.norm()


@pytest.mark.parametrize("architecture", ["qwen3_vl", "qwen2_5_vl", "glm4v"])
@pytest.mark.parametrize("frames", [130, 768])
def test_clips_of_many_short_segments(architecture: str, frames: int, tmp_path: Path) -> None:
    """More segments than tokens of many budgets: capacities derived by division break here."""
    write_checkpoint(architecture, tmp_path, 0)
    tower = load_tower(tmp_path)
    plan = tower.planner.plan(VideoItem(frames, 2.0, 112, 112))
    pixels = [np.random.default_rng(frames).integers(0, 256, plan.pixel_bytes, dtype=np.uint8)]
    few = {"default": [Capacity(96, 2, 3, 384), Capacity(512, 8, 16, 2048)]}
    graphs = GraphManager(tower, few)
    with torch.inference_mode():
        graphs.capture(lambda *_: None, on_failure="fail")
    rows = []
    for capacities in (few, {"default": [Capacity(plan.tokens, 1, plan.grid[0], 2048)]}):
        with InProcessEngine(tower, graphs, capacities, use_graphs=capacities is few, slot_bytes=256 << 20) as engine:
            items = engine.place([plan], pixels, "float32")
            engine.run(items)
            rows.append(engine.rows(items[0]))
            engine.free(items)
            largest = max(run.load.segments for batch in engine.batches for run in batch.runs)
            assert largest == (16 if capacities is few else plan.grid[0])
    assert torch.isfinite(rows[0]).all()
    assert (rows[0] - rows[1]).norm() <= 1e-5 * rows[1].norm()
