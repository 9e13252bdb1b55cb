"""What may run as a replay: the one rule that batcher, dispatcher, and whoever cuts long items share. Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import attrgetter

from msgspec.structs import replace

from .models.base import Planner
from .types import Capacity, ItemPlan, Load, Reason

_units = attrgetter("units")


def holds(capacity: Capacity, load: Load) -> bool:
    """Whether buffers of this capacity can take this load."""
    return (
        load.units <= capacity.units
        and load.items <= capacity.items
        and load.segments <= capacity.segments
        and load.longest <= capacity.longest
    )


def fits(capacities: Sequence[Capacity], load: Load) -> Capacity | Reason:
    """The smallest of ascending `capacities` that holds `load`, else why none does.

    The one rule of what may run as a replay: the batcher fills a batch by it, the dispatcher chooses by it.
    """
    for capacity in capacities[bisect_left(capacities, load.units, key=_units) :]:
        if holds(capacity, load):
            return capacity
    if not capacities:
        return Reason.NOT_CAPTURED
    if load.units > capacities[-1].units:
        return Reason.TOO_MANY_TOKENS
    if load.items > max(c.items for c in capacities):
        return Reason.TOO_MANY_ITEMS
    if load.longest > max(c.longest for c in capacities if c.units >= load.units):
        return Reason.SEGMENT_TOO_LONG
    return Reason.TOO_MANY_SEGMENTS


def some_holds(capacities: Sequence[Capacity], load: Load) -> bool:
    """Whether `fits` finds a capacity; the largest are tried first, which is faster where one does."""
    return any(holds(capacity, load) for capacity in reversed(capacities))


def held_alone(plan: ItemPlan, bounds: Mapping[str, Sequence[Capacity]]) -> bool:
    """Whether on every path some capacity holds this item, or part of one."""
    return all(some_holds(bounds[path], Load.of([asked])) for path, asked in plan.paths.items() if asked.units)


def cut(plan: ItemPlan, planner: Planner, bounds: Mapping[str, Sequence[Capacity]]) -> list[ItemPlan]:
    """The parts of an item that no capacity holds, in order; [plan] where one does, or where it cannot be cut.

    Parts do not name their frames: no tower asks, and with all of them in each part no message would hold a long video.
    """
    if held_alone(plan, bounds):
        return [plan]
    parts = planner.split(plan, lambda part: held_alone(part, bounds))
    return [replace(part, frame_indices=(), timestamps=()) for part in parts]
