"""Every architecture of tiles through the graph manager and the dispatcher, on the recorder and on CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from devices import on_cuda
from opticnerve_server.bench.inprocess import InProcessEngine
from opticnerve_server.graphs import GraphManager, plan_capacities
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.selftest import self_test
from opticnerve_server.types import Launch, Outcome
from oracles import tiled_media
from tiny_models import TILES
from towers import PATH, assert_close, load_tower, run_tower

BUDGETS = (1, 3, 8)
"""In tiles."""


@pytest.fixture(params=["cpu", on_cuda()])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=TILES)
def graphs(request: pytest.FixtureRequest, device: str, tmp_path: Path) -> GraphManager:
    write_checkpoint(request.param, tmp_path)
    tower = load_tower(tmp_path, device=device)
    paths = tower.planner.paths
    tokens = tuple(tiles * paths[PATH].tokens_per_unit for tiles in BUDGETS)
    planned = plan_capacities(paths, explicit={"": tokens}, cap=None, max_items=None, launch=Launch.ROWS)
    graphs = GraphManager(tower, planned)
    with torch.inference_mode():
        graphs.capture(lambda *_: None, on_failure="fail")
    return graphs


def test_the_self_test_passes_on_every_budget(graphs: GraphManager) -> None:
    tried: list[int] = []
    self_test(graphs, lambda path, capacity: tried.append(capacity.units))
    assert tried == graphs.paths[PATH].budgets == list(BUDGETS)


def test_batches_through_the_dispatcher_give_the_rows_of_the_eager_forward(graphs: GraphManager) -> None:
    """One tile, several images, an image of more tiles than any budget, which goes as parts: small, large, small."""
    tower: Any = graphs.tower
    planner, side = tower.planner, tower.planner.side
    square, other = (tiled_media(planner, side // 2, side // 2, seed=seed) for seed in (0, 1))
    wide, large = (tiled_media(planner, rows * side, 3 * side, seed=rows) for rows in (1, 3))
    assert square.plan.paths[PATH].units == 1
    capacities = {PATH: graphs.paths[PATH].capacities}
    with InProcessEngine(tower, graphs, capacities, use_graphs=True, slot_bytes=64 << 20) as engine:
        for batch in ([square], [wide, square, other], [large], [square, *[large] * 3], [square]):
            items = engine.place([media.plan for media in batch], [media.frames for media in batch], "float32")
            engine.run(items)
            for item, media in zip(items, batch, strict=True):
                assert_close(engine.rows(item), run_tower(tower, [media]), tower)
            engine.free(items)
    runs = [run for finished in engine.batches for run in finished.runs]
    assert {run.outcome for run in runs} == {Outcome.HIT}
    assert {runs[0].budget, runs[-1].budget} == {1}
    assert {run.budget for run in runs} <= set(BUDGETS)
