"""After capture, every graph is tried on random data before the first request can reach it.

For each: a replay must be bit-equal to the plain forward on the same static buffers, and close to an eager forward of
the tight capacity; then small -> large -> small must repeat itself. Everything that the batch does not define is
poisoned first: bytes of 255, which are NaN as floats and out of range as indices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from .budgets import holds
from .buffers import Packing
from .graphs import FEW_SEGMENTS, Graph, GraphManager, GraphsFailed, eager_capacity
from .models.base import PIXELS, ImageItem, PlanError, Planner, Tower
from .types import Capacity, ItemPlan, Load

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest relative error (norm ratio) of a replay against the eager forward. Their GEMMs differ in shape, hence in the
order of sums; over 32 layers of random weights in bfloat16 that alone makes about 2e-2."""

ROW_TOLERANCE = 5
"""How many times TOLERANCE the worst row may differ: a row that took in padding differs by about its own size."""

POISON = 255

ELSEWHERE = 1 << 26
"""Lines said of the paths that are not tried: more than they have, so that theirs are told from the tried one's."""


def sample_parts(planner: Planner, path: str, capacity: Capacity) -> list[ItemPlan]:
    """Images that fill a capacity as far as their sizes allow; none if the smallest is too big.

    The largest first where segments are few. Else one of half the units at most, then as many small ones as there is
    room for: a batch of one segment would try nothing that a graph of few segments does not.
    """
    plans: dict[tuple[int, int, int], ItemPlan] = {}
    for side in (*range(4, 32, 4), *range(32, 4096, 32)):
        for height, width in ((side, side), (side, 2 * side)):
            try:
                plan = planner.plan(ImageItem(height, width))
            except PlanError:
                continue
            plans[plan.height, plan.width, plan.paths[path].units] = plan

    def units(plan: ItemPlan) -> int:
        return plan.paths[path].units

    sizes = sorted(plans.values(), key=units, reverse=True)
    parts: list[ItemPlan] = []
    if capacity.segments > FEW_SEGMENTS:
        half = replace(capacity, units=capacity.units // 2)
        parts = [plan for plan in sizes if units(plan) and holds(half, Load.of([plan.paths[path]]))][:1]
        sizes = sorted(plans.values(), key=units)  # of equals still the smallest image first
    for plan in sizes:
        while units(plan) and holds(capacity, Load.of(part.paths[path] for part in [*parts, plan])):
            parts.append(plan)
    return parts


def write_batch(
    tower: Tower, path: str, parts: Sequence[ItemPlan], packing: Packing, block: torch.Tensor, seed: int
) -> dict[str, torch.Tensor]:
    """Poison a block, then write a batch of `parts` with random pixels into it; returns the static buffers."""
    block.fill_(POISON)
    metadata = np.empty(packing.meta_bytes, dtype=np.uint8)
    tower.fill(path, parts, packing.metadata(metadata))
    block[: packing.meta_bytes].copy_(torch.from_numpy(metadata))
    used = sum(part.paths[path].pixel_bytes for part in parts)
    pixels = np.random.default_rng(seed).integers(0, 256, used, dtype=np.uint8)
    buffers = packing.tensors(block)
    buffers[PIXELS][:used].copy_(torch.from_numpy(pixels))
    return buffers


def used_lines(tower: Tower, path: str, parts: Sequence[ItemPlan], lines: int) -> npt.NDArray[np.int64]:
    """Which lines of a path's output the rows of `parts` are made of, in their order."""
    counts = {name: lines if name == path else ELSEWHERE for name in tower.planner.paths}
    begin = sum(counts[name] for name in list(counts)[: list(counts).index(path)])
    index = tower.gather_index(parts, counts) - begin
    return index[(index >= 0) & (index < lines)].astype(np.int64)


def self_test(graphs: GraphManager, progress: Callable[[str, Capacity], None]) -> None:
    """Try every captured graph; raises GraphsFailed at the first that is wrong. Device thread only."""
    with torch.inference_mode():
        for path, state in graphs.paths.items():
            tested = [graph for graph in state.graphs.values() if _test(graphs, path, graph, progress)]
            if len(tested) > 1:
                small, large = tested[0], tested[-1]
                first = _replay(graphs, path, small)
                _replay(graphs, path, large)
                if not torch.equal(first, _replay(graphs, path, small)):
                    raise GraphsFailed(f"{_name(path, small)} gives other rows after the largest graph has run")


def _test(graphs: GraphManager, path: str, graph: Graph, progress: Callable[[str, Capacity], None]) -> bool:
    """Whether there was an image small enough to try this graph with."""
    tower = graphs.tower
    parts = sample_parts(tower.planner, path, graph.capacity)
    if not parts:
        return False
    replayed = _replay(graphs, path, graph)
    buffers = write_batch(tower, path, parts, graph.packing, graphs.arena, seed=graph.capacity.units)
    lines = torch.from_numpy(used_lines(tower, path, parts, graph.lines)).to(tower.device)
    plain = tower.forward(path, buffers, graph.capacity)[lines]
    if not torch.isfinite(replayed).all():
        raise GraphsFailed(f"{_name(path, graph)} returns NaN or infinity for random images")
    if not torch.equal(replayed, plain):
        raise GraphsFailed(f"{_name(path, graph)} is not bit-equal to the forward it was captured from")
    eager = eager_capacity(tower.planner.paths[path], Load.of(part.paths[path] for part in parts))
    packing = Packing.of(tower.buffers(path, eager))
    block = torch.empty(packing.size, dtype=torch.uint8, device=tower.device)
    output = tower.forward(path, write_batch(tower, path, parts, packing, block, seed=graph.capacity.units), eager)
    rows = output[torch.from_numpy(used_lines(tower, path, parts, output.shape[0])).to(tower.device)]
    difference, size = (replayed - rows).float().norm(dim=1), rows.float().norm(dim=1)
    error, worst = (difference.norm() / size.norm()).item(), (difference / size.clamp_min(1e-30)).max().item()
    if not (error <= TOLERANCE[tower.dtype] and worst <= ROW_TOLERANCE * TOLERANCE[tower.dtype]):
        raise GraphsFailed(
            f"{_name(path, graph)} differs from the eager forward by {error:.1e} (relative), a row by {worst:.1e}"
        )
    progress(path, graph.capacity)
    return True


def _replay(graphs: GraphManager, path: str, graph: Graph) -> torch.Tensor:
    """The rows of one replay on a fresh random batch, the same at every call."""
    tower = graphs.tower
    parts = sample_parts(tower.planner, path, graph.capacity)
    write_batch(tower, path, parts, graph.packing, graphs.arena, seed=graph.capacity.units)
    graph.output.fill_(float("nan"))
    graph.replay()
    lines = torch.from_numpy(used_lines(tower, path, parts, graph.lines)).to(tower.device)
    return graph.output[lines].clone()


def _name(path: str, graph: Graph) -> str:
    capacity = graph.capacity
    return f"the graph of path {path} for {capacity.units} units and {capacity.segments} segments"
