"""Graphs, copies and streams: overlapping batches, poison on whatever is given back, every budget of every path.

On a real device all architectures, and on the recorder that stands for CUDA one of each kind with small budgets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from devices import on_cuda
from opticnerve_server.bench.inprocess import InProcessEngine
from opticnerve_server.claims import Item
from opticnerve_server.graphs import GraphManager, plan_capacities
from opticnerve_server.models import registry
from opticnerve_server.models.base import ImageItem, Tower
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.parts import Batch, Part
from opticnerve_server.selftest import TOLERANCE, sample_parts, self_test
from opticnerve_server.types import Capacity, Outcome

SIZES = [(224, 224), (336, 336), (64, 2000), (672, 448), (100, 100), (1000, 1400), (333, 500), (28, 28), (800, 800)]
SMALL = [(224, 224), (100, 100), (28, 28), (200, 300)]

CASES = [*(("cpu", name) for name in ("qwen2_5_vl", "internvl", "deepseek_ocr")), *map(on_cuda, registry.ARCHITECTURES)]
Sizes = list[tuple[int, int]]


class Loaded(NamedTuple):
    tower: Tower
    graphs: GraphManager
    capacities: dict[str, list[Capacity]]


def load(architecture: str, folder: Path, device: str, dtype: str = "bfloat16") -> Loaded:
    write_checkpoint(architecture, folder, 0)
    source = registry.open_model(str(folder), "safetensors")
    planner = registry.build_planner(source)
    loaded = registry.build_tower(
        source, planner, load_format="safetensors", device=device, dtype=dtype, attention_backend="auto", kernels="auto"
    )
    cap = 128 if device == "cpu" else 5120 if dtype == "bfloat16" else 512
    capacities = plan_capacities(planner.paths, explicit={}, cap=cap, max_items=None, launch=loaded.launch)
    graphs = GraphManager(loaded.tower, capacities)
    with torch.inference_mode():
        graphs.capture(lambda *_: None, on_failure="fail")
    return Loaded(loaded.tower, graphs, capacities)


def place(engine: InProcessEngine, sizes: Sizes, seed: int) -> list[Item]:
    rng = np.random.default_rng(seed)
    plans = [engine.tower.planner.plan(ImageItem(*size)) for size in sizes]
    pixels = [rng.integers(0, 256, plan.pixel_bytes, dtype=np.uint8) for plan in plans]
    return engine.place(plans, pixels, "bfloat16")


def rows_of(engine: InProcessEngine, calls: list[Sizes]) -> list[torch.Tensor]:
    """The rows of every item; all calls are placed first, then submitted at once, so that batches overlap."""
    items = [item for seed, sizes in enumerate(calls) for item in place(engine, sizes, seed)]
    engine.run(items)
    rows = [engine.rows(item) for item in items]
    engine.free(items)
    return rows


def poison(engine: InProcessEngine, graphs: GraphManager) -> None:
    """From now on, whatever a batch is about to use is overwritten before, where the batch before has let go of it.

    On the device thread, and in the order of its streams: a batch may be launched while another is computed.
    """
    dispatcher = engine.dispatcher
    streams, land, launch = dispatcher._streams, dispatcher.land, dispatcher._launch

    @torch.inference_mode()
    def poisoned_land(part: Part) -> int:
        landing, before = dispatcher._landings[dispatcher._turn], dispatcher._computed[dispatcher._turn]
        if not landing.used:
            streams.copy_in()
            if before is not None:
                streams.wait(before)
            landing.block.fill_(255)
        return land(part)

    @torch.inference_mode()
    def poisoned_launch(batch: Batch, turn: int, taken_at: float) -> Any:
        dispatcher._staging[turn].block.fill_(255)
        streams.compute()
        graphs.arena.fill_(255)
        for output in graphs._outputs.values():
            output.fill_(float("nan"))
        return launch(batch, turn, taken_at)

    dispatcher.land, dispatcher._launch = poisoned_land, poisoned_launch  # type: ignore[method-assign]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("device", "architecture"), CASES)
def test_every_graph_replays_its_forward(device: str, architecture: str, dtype: str, tmp_path: Path) -> None:
    """All that an image of this model fits into."""
    loaded = load(architecture, tmp_path, device, dtype)
    tested: list[tuple[str, Capacity]] = []
    self_test(loaded.graphs, lambda path, capacity: tested.append((path, capacity)))
    captured = [(path, capacity) for path, own in loaded.capacities.items() for capacity in own]
    assert tested == [
        (path, capacity) for path, capacity in captured if sample_parts(loaded.tower.planner, path, capacity)
    ]
    for path, own in loaded.capacities.items():
        assert own[-1].units in {capacity.units for name, capacity in tested if name == path}
        assert loaded.graphs.paths[path].capacities == own


@pytest.mark.parametrize(("device", "architecture"), CASES)
def test_overlapping_batches_with_poison_equal_eager_ones(device: str, architecture: str, tmp_path: Path) -> None:
    tower, graphs, capacities = load(architecture, tmp_path, device)
    sizes, count = (SIZES, 60) if device == "cuda" else (SMALL, 12)
    rng = np.random.default_rng(1)
    calls = [[sizes[i] for i in rng.integers(0, len(sizes), rng.integers(1, 9))] for _ in range(count)]
    with InProcessEngine(tower, graphs, capacities, use_graphs=False) as engine:
        expected = rows_of(engine, calls)
    with InProcessEngine(tower, graphs, capacities, use_graphs=True) as engine:
        poison(engine, graphs)
        replayed = rows_of(engine, calls)
        assert len(engine.batches) >= 3
        assert {run.outcome for batch in engine.batches for run in batch.runs} == {Outcome.HIT}
        assert all(result.failure is None for batch in engine.batches for result in batch.results)
    for mine, reference in zip(replayed, expected, strict=True):
        assert (mine.float() - reference.float()).norm() <= TOLERANCE[torch.bfloat16] * reference.float().norm()


@pytest.mark.parametrize(("device", "architecture"), CASES)
def test_rows_do_not_depend_on_batch_mates(device: str, architecture: str, tmp_path: Path) -> None:
    """Bit for bit, in the largest graph of each path, which then runs every batch."""
    tower, graphs, capacities = load(architecture, tmp_path, device)
    sizes = [*SIZES[:6], *SMALL] if device == "cuda" else SMALL  # the small ones meet where tiles are tiny, too
    largest = {path: max(own, key=lambda c: (c.units, -c.segments)) for path, own in capacities.items()}
    for path, state in graphs.paths.items():
        state.graphs = {largest[path]: state.graphs[largest[path]]}
    pinned = {path: [capacity] for path, capacity in largest.items()}
    with InProcessEngine(tower, graphs, pinned, use_graphs=True) as engine:
        together = rows_of(engine, [[size] for size in sizes])
        runs = {(run.path, run.budget) for batch in engine.batches for run in batch.runs}
        assert runs == {(path, capacity.units) for path, capacity in largest.items()}
        assert max(len(batch.results) for batch in engine.batches) > 1
        for seed, size in enumerate(sizes):
            item = place(engine, [size], seed)
            engine.run(item)
            assert torch.equal(engine.rows(item[0]), together[seed])
            engine.free(item)


@pytest.mark.parametrize("device", ["cpu", on_cuda()])
def test_an_image_over_the_cap_is_one_eager_forward(device: str, tmp_path: Path) -> None:
    tower, graphs, capacities = load("qwen3_vl", tmp_path, device)
    side = 2560 if device == "cuda" else 832
    with InProcessEngine(tower, graphs, capacities, use_graphs=True) as engine:
        items = place(engine, [(side, side)], 0)
        engine.run(items)
        (batch,) = engine.batches
        (run,) = batch.runs
        assert run.outcome is Outcome.MISS
        assert torch.isfinite(engine.rows(items[0]).float()).all()
