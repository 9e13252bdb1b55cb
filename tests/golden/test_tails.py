"""Every architecture where attention leaves NaN behind the last segment, as its CUDA kernels may: it reaches no row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opticnerve_server.attention.sdpa import Sdpa
from opticnerve_server.bench.inprocess import InProcessEngine
from opticnerve_server.buffers import Packing
from opticnerve_server.graphs import GraphManager, plan_capacities
from opticnerve_server.models import registry
from opticnerve_server.models.base import ImageItem, VideoItem
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.selftest import self_test, used_lines, write_batch
from opticnerve_server.sentinel import Sentinel
from opticnerve_server.types import Capacity, ItemPlan, Launch, Load
from towers import load_tower

DENSE = {"deepseek_ocr", "step3_vl", "step_vl", "step3p7"}
"""Views of one size, which attend without a backend."""

SPARE = 21
"""Units, and segments, that a capacity has beyond its batch."""


def leave_nan(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on attention fills what it may with NaN, and wants of its values what it is promised.

    Returns the rows behind the last segment, a number for each call to come.
    """
    calls: list[int] = []
    attend = Sdpa.attend

    def left(self: Sdpa, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *bounds: int) -> torch.Tensor:
        calls.append(len(q) - int(cu_q[-1]))
        assert v[cu_k[-1] :].isfinite().all(), "0 x NaN is NaN"
        rows = attend(self, q, k, v, cu_q, cu_k, *bounds)
        rows[cu_q[-1] :] = torch.nan
        return rows

    monkeypatch.setattr(Sdpa, "attend", left)
    return calls


def forward(tower: Any, path: str, parts: Sequence[ItemPlan]) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that the parts have of a path with room to spare, and its whole output."""
    load = Load.of(part.paths[path] for part in parts)
    capacity = Capacity(load.units + SPARE, load.items, load.segments + SPARE, load.longest)
    packing = Packing.of(tower.buffers(path, capacity))
    block = torch.empty(packing.size, dtype=torch.uint8)
    output: torch.Tensor = tower.forward(path, write_batch(tower, path, parts, packing, block, seed=0), capacity)
    return output[torch.from_numpy(used_lines(tower, path, parts, len(output)))], output


@torch.inference_mode()
@pytest.mark.parametrize("architecture", registry.ARCHITECTURES)
def test_rows_are_the_same_bits(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(architecture, tmp_path)
    tower = load_tower(tmp_path)
    items: list[ImageItem | VideoItem] = [ImageItem(60, 90), ImageItem(150, 56)]
    if "video" in tower.planner.modalities and architecture != "gemma4":  # whose clip is 20,000 rows
        items.insert(1, VideoItem(32, 8.0, 60, 90))
    parts = [tower.planner.plan(item) for item in items]
    paths = [path for path in tower.planner.paths if any(part.paths[path].units for part in parts)]
    clean = {path: forward(tower, path, parts)[0] for path in paths}
    calls = leave_nan(monkeypatch)
    for path in paths:
        rows, output = forward(tower, path, parts)
        assert torch.equal(rows, clean[path])
        assert output.isnan().any() == (architecture not in DENSE)
    assert (len(calls) >= 2 and min(calls) > 0) == (architecture not in DENSE)


@pytest.mark.parametrize("architecture", ["qwen2_5_vl", "internvl"])
def test_whoever_judges_an_output_looks_at_rows_alone(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-test, the sentinel, and the dispatcher with its peaks."""
    write_checkpoint(architecture, tmp_path)
    tower, calls = load_tower(tmp_path), leave_nan(monkeypatch)
    planned = plan_capacities(tower.planner.paths, explicit={"": (96,)}, cap=None, max_items=None, launch=Launch.ROWS)
    graphs = GraphManager(tower, planned)
    with torch.inference_mode():
        graphs.capture(lambda *_: None, on_failure="fail")
    self_test(graphs, lambda *_: None)
    Sentinel(graphs, planned).run()
    plans = [tower.planner.plan(ImageItem(*size)) for size in ((60, 90), (150, 56), (60, 90))]
    pixels = [np.random.default_rng(0).integers(0, 256, plan.pixel_bytes, dtype=np.uint8) for plan in plans]
    for use_graphs in (True, False):
        with InProcessEngine(tower, graphs, planned, use_graphs=use_graphs, slot_bytes=8 << 20) as engine:
            items = engine.place(plans, pixels, "float32")
            engine.run(items)
            assert all(result.failure is None for batch in engine.batches for result in batch.results)
            first, _, last = (engine.rows(item) for item in items)
            assert torch.equal(first, last)
            engine.free(items)
    assert max(calls) > 0
