"""One encode call in process: from pixels to rows, by each policy, as a whole and without its copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ..claims import Item
from ..graphs import Graph, GraphManager
from ..models.base import Tower
from ..selftest import write_batch
from ..types import ItemPlan, Load
from .batches import random_pixels
from .build import Built
from .ceiling import measure_ceiling
from .inprocess import InProcessEngine
from .policies import Policy
from .timing import device_ms, repeated

CALL_DTYPE = "bfloat16"


def engine_of(tower: Tower, policy: Policy) -> InProcessEngine:
    return InProcessEngine(tower, policy.graphs, policy.capacities, use_graphs=policy.use_graphs)


def place(engine: InProcessEngine, policy: Policy, plans: Sequence[ItemPlan]) -> list[Item]:
    """The items of a call, in the order of the policy."""
    ordered = policy.ordered(plans)
    return engine.place(ordered, random_pixels(ordered), CALL_DTYPE)


def measure(engine: InProcessEngine, items: Sequence[Item], repeats: int, *, landed_first: bool) -> dict[str, Any]:
    """Times of one call, as `timing.Times`, with the budget of each dispatch, 0 when eager.

    From when the pixels are in the slots to when the rows are; or, with `landed_first`, from when the dispatcher is
    given the first batch, whose pixels are on the device, to when the last one is computed: host work is in both.
    """
    engine.landed_first = landed_first

    def once() -> float:
        engine.forget()
        seconds = engine.run(items)
        return engine.computed_at[-1] - engine.given_at[0] if landed_first else seconds

    times = repeated(once, repeats)
    return {**asdict(times), "budgets": [run.budget for batch in engine.batches for run in batch.runs]}


def replay_and_ceiling(
    built: Built, graphs: GraphManager, plans: Sequence[ItemPlan], repeats: int
) -> tuple[float, float | None] | None:
    """Milliseconds, of the device alone, of the replays of one batch and of their ceilings, all paths together.

    None where a path has no graph for it, no ceiling where a path has none. Inference mode, and an idle device.
    """
    replay, ceiling = 0.0, 0.0
    has_ceiling = True
    for path, graph in _written(graphs, plans):
        if graph is None:
            return None
        found = measure_ceiling(built, path, graph, repeats)
        has_ceiling &= found is not None
        ceiling += found.ms if found else 0.0
        replay += device_ms(graph.replay, built.tower.device, repeats)
    return replay, ceiling if has_ceiling else None


def _written(graphs: GraphManager, plans: Sequence[ItemPlan]) -> Iterator[tuple[str, Graph | None]]:
    """Every path that has work and the graph for it, one at a time, with the batch in the arena that they share."""
    for path in graphs.tower.planner.paths:
        load = Load.of(plan.paths[path] for plan in plans)
        if not load.units:
            continue
        graph = graphs.choose(path, load)
        if not isinstance(graph, Graph):
            yield path, None
            continue
        write_batch(graphs.tower, path, plans, graph.packing, graphs.arena, seed=0)
        yield path, graph
