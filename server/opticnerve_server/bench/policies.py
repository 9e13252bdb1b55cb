"""Two other policies of dispatch, on the same kernels, in benches alone: greedy packing, and no graphs.

`ours` is a server's: a call's images in their order, as many in a batch as the largest graph holds, each batch by the
smallest of the automatic budgets that holds it, and later images in what padding that leaves.

`greedy` is what vLLM's `EncoderCudaGraphManager` did up to 0.33, with what it derives by itself. Budgets are the
smallest, its doubles, and the largest. The images of a call are sorted by their tokens, the smallest first; each joins
the batch of the one before it while that has less than N images and their tokens stay within the largest budget; each
batch runs by the smallest budget that holds its tokens. N is the largest budget / the smallest, but not above the
smallest. Here its largest budget is ours, and so are the classes of segments of a budget; one more, which holds any
segments that N images have, keeps segments from ever deciding on a budget.

`eager` runs a whole call as one forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..graphs import GraphManager, eager_capacity, plan_capacities
from ..models.base import PathSpec
from ..types import Capacity, ItemPlan, Launch, Load
from .build import Built

Capacities = Mapping[str, Sequence[Capacity]]


@dataclass(frozen=True, slots=True)
class Policy:
    """What an engine must be told, and in which order it gets a call's images: the packing is its batcher's."""

    name: str
    graphs: GraphManager
    capacities: Capacities
    use_graphs: bool
    ordered: Callable[[Sequence[ItemPlan]], list[ItemPlan]] = list


def doubled(lowest: int, highest: int) -> list[int]:
    """The powers of two times `lowest` below `highest`, and `highest`."""
    levels = [lowest]
    while levels[-1] * 2 < highest:
        levels.append(levels[-1] * 2)
    return [*levels, highest] if levels[-1] < highest else [highest]


def most_images(paths: Mapping[str, PathSpec], cap: int) -> int:
    """N of `greedy`, for budgets of up to `cap` tokens."""
    lowest = min(spec.min_units * spec.tokens_per_unit for spec in paths.values())
    return max(1, min(cap // lowest, lowest))


def greedy_capacities(paths: Mapping[str, PathSpec], ours: Capacities, cap: int, launch: Launch) -> Capacities:
    """What `greedy` captures, on every path up to the largest budget of `ours`."""
    explicit = {
        name: [units * spec.tokens_per_unit for units in doubled(spec.min_units, ours[name][-1].units)]
        for name, spec in paths.items()
    }
    images = most_images(paths, cap)
    planned = plan_capacities(paths, explicit=explicit, cap=None, max_items=images, launch=launch)
    for name, spec in paths.items():
        if not spec.fixed_units and launch is Launch.TILES:
            budgets = {capacity.units: capacity.items for capacity in planned[name]}
            planned[name] += [
                Capacity(units, items, segments=items, longest=units * spec.rows_per_unit)
                for units, items in budgets.items()
            ]
            planned[name] = sorted(set(planned[name]), key=lambda c: (c.units, c.segments * c.longest))
    return planned


def smallest_first(plans: Sequence[ItemPlan]) -> list[ItemPlan]:
    """The order of `greedy`; of images of one size that of the call."""
    return sorted(plans, key=lambda plan: plan.tokens)


def greedy(built: Built, ours: Capacities, cap: int) -> Policy:
    """Captures its graphs. Inference mode."""
    capacities = greedy_capacities(built.tower.planner.paths, ours, cap, built.attention.launch)
    graphs = GraphManager(built.tower, capacities)
    graphs.capture(lambda *_: None, on_failure="fail")
    return Policy("greedy", graphs, capacities, use_graphs=True, ordered=smallest_first)


def eager(graphs: GraphManager, calls: Sequence[Sequence[ItemPlan]]) -> Policy:
    """One forward for each of `calls`: its capacities hold the largest of them in every respect."""
    capacities = {}
    for path, spec in graphs.tower.planner.paths.items():
        each = [eager_capacity(spec, Load.of(plan.paths[path] for plan in plans)) for plans in calls]
        most = Capacity(
            units=max(capacity.units for capacity in each),
            items=max(capacity.items for capacity in each),
            segments=max(capacity.segments for capacity in each),
            longest=max(capacity.longest for capacity in each),
        )
        capacities[path] = [most] if most.units else []
    return Policy("eager", graphs, capacities, use_graphs=False)
