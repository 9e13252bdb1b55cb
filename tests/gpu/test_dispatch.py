"""Graphs, copies and streams on a real device: overlapping batches, poison on whatever is given back, every budget."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from opticnerve_server.bench.inprocess import InProcessEngine
from opticnerve_server.graphs import GraphManager, plan_capacities
from opticnerve_server.ledger import Item
from opticnerve_server.models import registry
from opticnerve_server.models.base import ImageItem, Tower
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.selftest import self_test
from opticnerve_server.types import Capacity, Outcome

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ARCHITECTURES = ["qwen3_vl", "qwen2_5_vl"]
SIZES = [(224, 224), (336, 336), (64, 2000), (672, 448), (100, 100), (1000, 1400), (333, 500), (28, 28), (800, 800)]


def load(architecture: str, folder, dtype: str = "bfloat16") -> tuple[Tower, GraphManager, dict[str, list[Capacity]]]:
    write_checkpoint(architecture, folder, 0)
    source = registry.open_model(str(folder), "safetensors")
    planner = registry.build_planner(source)
    loaded = registry.build_tower(
        source, planner, load_format="safetensors", device="cuda", dtype=dtype, attention_backend="auto"
    )
    capacities = plan_capacities(
        planner.paths,
        explicit={},
        cap=5120 if dtype == "bfloat16" else 512,
        max_items=None,
        launches_by_segments=loaded.launches_by_segments,
    )
    graphs = GraphManager(loaded.tower, capacities)
    with torch.inference_mode():
        graphs.capture(lambda *_: None, on_failure="fail")
    return loaded.tower, graphs, capacities


def place(engine: InProcessEngine, sizes: list[tuple[int, int]], seed: int) -> list[Item]:
    rng = np.random.default_rng(seed)
    plans = [engine.tower.planner.plan(ImageItem(*size)) for size in sizes]
    pixels = [rng.integers(0, 256, plan.pixel_bytes, dtype=np.uint8) for plan in plans]
    return engine.place(plans, pixels, "bfloat16")


def rows_of(engine: InProcessEngine, calls: list[list[tuple[int, int]]]) -> list[torch.Tensor]:
    """The rows of every item; all calls are placed first, then submitted at once, so that batches overlap."""
    items = [item for seed, sizes in enumerate(calls) for item in place(engine, sizes, seed)]
    engine.run(items)
    rows = [engine.rows(item) for item in items]
    engine.free(items)
    return rows


def poisoner(graphs: GraphManager, engine: Callable[[], InProcessEngine]) -> Callable[[], None]:
    """Overwrites, after each batch, what only that batch may still have been using."""
    computed = 0

    def poison() -> None:
        nonlocal computed
        with torch.inference_mode():
            graphs.arena.fill_(255)
            engine().dispatcher._landings[computed % 2].block.fill_(255)
            for output in graphs._outputs.values():
                output.fill_(float("nan"))
            torch.cuda.synchronize()
        computed += 1

    return poison


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_graph_replays_its_forward(architecture: str, dtype: str, tmp_path) -> None:
    _, graphs, _ = load(architecture, tmp_path, dtype)
    tested: list[Capacity] = []
    self_test(graphs, lambda path, capacity: tested.append(capacity))
    assert tested == graphs.paths["default"].capacities
    assert len({capacity.units for capacity in tested}) == (36 if dtype == "bfloat16" else 13)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_overlapping_batches_with_poison_equal_eager_ones(architecture: str, tmp_path) -> None:
    tower, graphs, capacities = load(architecture, tmp_path)
    rng = np.random.default_rng(1)
    calls = [[SIZES[i] for i in rng.integers(0, len(SIZES), rng.integers(1, 9))] for _ in range(60)]
    with InProcessEngine(tower, graphs, capacities, use_graphs=False) as engine:
        expected = rows_of(engine, calls)
    holder: list[InProcessEngine] = []
    with InProcessEngine(
        tower, graphs, capacities, use_graphs=True, on_computed=poisoner(graphs, lambda: holder[0])
    ) as engine:
        holder.append(engine)
        replayed = rows_of(engine, calls)
        assert len(engine.batches) >= 3
        assert {run.outcome for batch in engine.batches for run in batch.runs} == {Outcome.HIT}
        assert all(result.failure is None for batch in engine.batches for result in batch.results)
    for mine, reference in zip(replayed, expected, strict=True):
        assert (mine.float() - reference.float()).norm() <= 2e-2 * reference.float().norm()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_do_not_depend_on_batch_mates(architecture: str, tmp_path) -> None:
    tower, graphs, _ = load(architecture, tmp_path)
    pinned = {"default": [c for c in graphs.paths["default"].capacities if c.units == 5120 and c.segments == 8]}
    with InProcessEngine(tower, graphs, pinned, use_graphs=True) as engine:
        for path in graphs.paths.values():
            path.graphs = {capacity: graph for capacity, graph in path.graphs.items() if capacity in pinned["default"]}
        calls = [[size] for size in SIZES[:6]]
        together = rows_of(engine, calls)
        assert len(engine.batches) == 1
        for seed, size in enumerate(SIZES[:6]):
            item = place(engine, [size], seed)
            engine.run(item)
            assert torch.equal(engine.rows(item[0]), together[seed])
            engine.free(item)


def test_an_image_over_the_cap_is_one_eager_forward(tmp_path) -> None:
    tower, graphs, capacities = load("qwen3_vl", tmp_path)
    with InProcessEngine(tower, graphs, capacities, use_graphs=True) as engine:
        items = place(engine, [(2560, 2560)], 0)
        engine.run(items)
        (batch,) = engine.batches
        (run,) = batch.runs
        assert run.outcome is Outcome.MISS
        assert torch.isfinite(engine.rows(items[0]).float()).all()
