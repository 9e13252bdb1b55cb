"""Every architecture of grids through the graph manager, on the recorder that stands for CUDA, and on CUDA itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from devices import on_cuda
from opticnerve_server.graphs import GraphManager, plan_capacities
from opticnerve_server.models.base import PIXELS, ImageItem
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.selftest import POISON, self_test
from opticnerve_server.types import Capacity, Launch, Load
from oracles import Media, media_for
from tiny_models import GRIDS, TINY
from towers import PATH, assert_close, load_tower, run_tower

BUDGETS = (96, 300, 512)


@pytest.fixture(params=GRIDS)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["cpu", on_cuda()])
def graphs(request: pytest.FixtureRequest, architecture: str, tmp_path: Path) -> GraphManager:
    write_checkpoint(architecture, tmp_path)
    tower = load_tower(tmp_path, device=request.param)
    graphs = GraphManager(
        tower,
        plan_capacities(tower.planner.paths, explicit={"": BUDGETS}, cap=None, max_items=16, launch=Launch.ROWS),
    )
    with torch.inference_mode():
        graphs.capture(lambda *_: None, on_failure="fail")
    return graphs


def test_the_self_test_passes(graphs: GraphManager, architecture: str) -> None:
    tried: list[int] = []
    self_test(graphs, lambda path, capacity: tried.append(capacity.units))
    assert graphs.paths[PATH].budgets == list(BUDGETS)
    assert tried == [units for units in BUDGETS if architecture != "gemma4" or units >= 252]  # its images are large


@pytest.mark.parametrize(
    ("architecture", "launch"),
    [("qwen3_vl", Launch.SEGMENTS), ("qwen3_vl", Launch.TILES), ("qwen2_5_vl", Launch.ROWS)],
)
def test_every_automatic_budget_passes_the_self_test(architecture: str, launch: Launch, tmp_path: Path) -> None:
    """With one class of segments a budget, as on a CPU, and with the two of a GPU."""
    write_checkpoint(architecture, tmp_path)
    tower = load_tower(tmp_path)
    planned = plan_capacities(tower.planner.paths, explicit={}, cap=512, max_items=None, launch=launch)
    graphs = GraphManager(tower, planned)
    tried: list[Capacity] = []
    with torch.inference_mode():
        graphs.capture(lambda *_: None, on_failure="fail")
        self_test(graphs, lambda path, capacity: tried.append(capacity))
    assert len(tried) == len(planned[PATH])
    assert set(tried) == set(planned[PATH])
    assert graphs.paths[PATH].budgets == [64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512]


def replay(graphs: GraphManager, batch: list[Media]) -> tuple[Capacity, torch.Tensor]:
    """The rows of a batch by the graph that is chosen for it; whatever the batch leaves open is poisoned."""
    plans = [media.plan for media in batch]
    graph = graphs.choose(PATH, Load.of(plan.paths[PATH] for plan in plans))
    assert not isinstance(graph, str), graph
    graphs.arena.fill_(POISON)
    metadata = np.empty(graph.packing.meta_bytes, np.uint8)
    graphs.tower.fill(PATH, plans, graph.packing.metadata(metadata))
    graphs.arena[: metadata.size].copy_(torch.from_numpy(metadata))
    pixels = np.concatenate([media.frames.ravel() for media in batch])
    graph.buffers[PIXELS][: pixels.size].copy_(torch.from_numpy(pixels))
    graph.replay()
    index = torch.from_numpy(graphs.tower.gather_index(plans, {PATH: graph.lines}))
    return graph.capacity, graph.output.cpu()[index]


@torch.inference_mode()
def test_stills_and_videos_replay_to_the_rows_of_the_eager_forward(graphs: GraphManager, architecture: str) -> None:
    side = TINY[architecture].merge
    grids = [(1, 2, 3), (4, 3, 2), (1, 1, 9), (2, 5, 5), (6, 2, 2)]
    media = [media_for(architecture, t, h * side, w * side, seed=i) for i, (t, h, w) in enumerate(grids)]
    small, large, small_again = media[:2], media * 3, media[1::-1]
    for batch, budget in ((small, 96), (large, 512), (small_again, 96)):
        capacity, rows = replay(graphs, batch)
        assert capacity.units == budget
        assert_close(rows, run_tower(graphs.tower, batch), graphs.tower)


@torch.inference_mode()
def test_an_image_that_just_fits_the_smallest_budget(graphs: GraphManager, architecture: str) -> None:
    """A capacity that is divided among items would not hold one of them."""
    tower: Any = graphs.tower
    plan = tower.planner.plan(ImageItem(252, 252))
    if plan.tokens > BUDGETS[0]:
        pytest.skip("this processor enlarges it")
    frame = np.random.default_rng(0).integers(0, 256, (1, plan.height, plan.width, 3), dtype=np.uint8)
    capacity, rows = replay(graphs, [Media(plan, frame)])
    assert capacity.units == BUDGETS[0]
    assert_close(rows, run_tower(tower, [Media(plan, frame)]), tower)
