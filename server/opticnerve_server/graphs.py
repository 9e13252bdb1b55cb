"""The graph manager: which capacities are captured, and their capture, choice, replay and self-test.

It knows towers only by their protocol (`models/base.py`). On a machine without CUDA the same manager runs with a
recorder that executes the forward on the static buffers again, so that padding, aliasing, budgets and dispatch are
exercised there exactly as on a GPU.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from .budgets import fits
from .buffers import Packing, aligned
from .models.base import PathSpec, Tower
from .types import Capacity, Launch, Load, Reason

log = logging.getLogger(__name__)

EAGER_ROWS = 128
"""An eager batch is padded to a multiple of this many rows, so that kernels do not specialise for every request."""

FEW_SEGMENTS = 8
"""Segments of the class of a budget whose one segment may fill it."""

SHORT_FRACTION = 8
"""The class of many segments takes segments of up to this fraction of its rows where a launch costs segments x longest
(FA2): two tight classes a budget are cheaper than one that allows both."""


class GraphsFailed(RuntimeError):
    """A capture or its self-test failed; start-up stops."""


def budget_levels(lowest: int, highest: int, cap: int | None) -> list[int]:
    """The automatic budgets from `lowest` up to the smaller of `highest` and `cap`, which is always included.

    Quarter-octave steps up to 1024, steps of 128 up to 2560, then each the previous x 2^(1/8), rounded up to a multiple
    of 128: 36 levels from 64 to 5120, so that padding stays below a fifth.
    """
    top = highest if cap is None else min(highest, cap)
    levels, level = [], lowest
    while level < top:
        levels.append(level)
        if level < 1024:
            step = max(1, (1 << (level.bit_length() - 1)) // 4)
            level = (level // step + 1) * step
        elif level < 2560:
            level = (level // 128 + 1) * 128
        else:
            level = math.ceil(level * 2**0.125 / 128) * 128
    return [*levels, top]


def unit_levels(highest: int, cap: int | None) -> list[int]:
    """The automatic budgets of a path whose units are tiles: exact for 1 to 16, then as above.

    16 or `highest`, the units of the largest item, is the largest, unless `cap` is smaller.
    """
    top = max(16, highest) if cap is None else min(max(16, highest), cap)
    exact = [n for n in range(1, 17) if n <= top]
    return exact if top <= 16 else [*exact, *[n for n in budget_levels(16, top, None) if n > 16]]


def plan_capacities(
    paths: Mapping[str, PathSpec],
    *,
    explicit: Mapping[str, Sequence[int]],
    cap: int | None,
    max_items: int | None,
    launch: Launch,
) -> dict[str, list[Capacity]]:
    """The capacities to capture on each path, ascending.

    `explicit` budgets of a path, or under "" of every path, replace the automatic ones. `cap` bounds the units of
    automatic budgets on all paths, None is the tower's own maximum. `max_items` defaults to the largest budget // the
    path's `min_units`: one explicit budget holds as many items as it would among automatic ones. Where `launch` is by
    rows, one class of a budget holds any segments. Else there are two: few segments, and many, short ones where it is
    by tiles. On a path whose unit is several tokens, `cap` and `explicit`, which are in tokens, come down to whole
    units. Raises ValueError for budgets of a path that the tower does not have, and for those below one unit.
    """
    unknown = sorted(set(explicit) - set(paths) - {""})
    if unknown:
        raise ValueError(f"token budgets name the path {unknown[0]}; this model has {', '.join(paths)}")
    planned = {}
    for name, spec in paths.items():
        most = None if cap is None else _units(name, spec, cap, "max_token_budget")
        if spec.fixed_units:
            automatic = unit_levels(spec.max_units, most)
        else:
            automatic = budget_levels(min(spec.min_units, most or spec.min_units), spec.max_units, most)
        given = explicit.get(name) or explicit.get("") or ()
        budgets = sorted({_units(name, spec, tokens, "a token budget") for tokens in given} or automatic)
        items = max_items or max(1, budgets[-1] // spec.min_units)
        planned[name] = [capacity for units in budgets for capacity in _classes(units, min(items, units), spec, launch)]
    return planned


def _units(path: str, spec: PathSpec, tokens: int, what: str) -> int:
    """The whole units of so many tokens. Raises ValueError if that is none."""
    if tokens < spec.tokens_per_unit:
        raise ValueError(
            f"{what} is {tokens}, but path {path} runs whole tiles of {spec.tokens_per_unit} tokens: use at least that"
        )
    return tokens // spec.tokens_per_unit


def _classes(units: int, items: int, spec: PathSpec, launch: Launch) -> list[Capacity]:
    if spec.fixed_units:  # a segment is a unit, no more and no less: one class is tight
        return [Capacity(units, items, segments=units, longest=spec.rows_per_unit)]
    rows, most = units * spec.rows_per_unit, max(1, units // spec.units_per_segment)
    if launch is Launch.ROWS:
        return [Capacity(units, items, segments=most, longest=rows)]
    few = Capacity(units, min(items, FEW_SEGMENTS), segments=min(most, FEW_SEGMENTS), longest=rows)
    longest = max(256, rows // SHORT_FRACTION) if launch is Launch.TILES else rows
    many = Capacity(units, items, segments=min(most, max(items, 64)), longest=longest)
    return [few] if many.segments <= few.segments else [few, many]


def eager_capacity(spec: PathSpec, load: Load) -> Capacity:
    """The capacity of one eager forward: the load's own, rounded up to EAGER_ROWS rows."""
    units = load.units
    if not spec.fixed_units:
        step = max(1, EAGER_ROWS // spec.rows_per_unit)
        units = -(-units // step) * step
    return Capacity(units, load.items, load.segments, load.longest)


@contextmanager
def no_collection() -> Iterator[None]:
    """A collection that frees another graph, or anything else of CUDA's, while one is captured aborts the process."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(slots=True)
class Graph:
    """One captured forward. `replay` runs it on the current stream; `output` is valid until the path's next replay."""

    capacity: Capacity
    buffers: dict[str, torch.Tensor]  # views of the arena
    packing: Packing
    output: torch.Tensor  # [lines, width], which other graphs of the path write too
    replay: Callable[[], None]

    @property
    def lines(self) -> int:
        return self.output.shape[0]


@dataclass(slots=True)
class PathGraphs:
    """The captured graphs of one path, by ascending capacity, and what they cost."""

    graphs: dict[Capacity, Graph] = field(default_factory=dict)
    memory_bytes: int = 0
    capture_s: float = 0.0

    @property
    def capacities(self) -> list[Capacity]:
        return list(self.graphs)

    @property
    def budgets(self) -> list[int]:
        return sorted({capacity.units for capacity in self.graphs})


class GraphManager:
    """Captures and replays; device thread only.

    It owns the arena, the output buffers of the paths and the memory pool of all graphs. Buffers and outputs of all
    capacities share their bytes: whoever writes a batch writes all of its metadata, and the used part of its pixels.
    """

    def __init__(self, tower: Tower, planned: Mapping[str, Sequence[Capacity]]) -> None:
        """Lay out the arena and outputs for the planned capacities; captures nothing yet."""
        self.tower = tower
        self._planned = planned
        packings = {
            (path, capacity): Packing.of(tower.buffers(path, capacity))
            for path, capacities in planned.items()
            for capacity in capacities
        }
        self.arena_bytes = max((aligned(packing.size) for packing in packings.values()), default=0)
        self.meta_bytes = max((packing.meta_bytes for packing in packings.values()), default=0)
        self._packings = packings
        self.arena = torch.zeros(self.arena_bytes, dtype=torch.uint8, device=tower.device)
        self._outputs: dict[str, torch.Tensor] = {}
        self.paths = {path: PathGraphs() for path in planned}
        self._cuda = tower.device.type == "cuda"
        if self._cuda:
            # One pool and one stream for all captures: the allocator reuses a pool's memory within a stream only.
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()

    def choose(self, path: str, load: Load) -> Graph | Reason:
        """The smallest captured graph that holds `load`, else why there is none."""
        chosen = fits(self.paths[path].capacities, load)
        return self.paths[path].graphs[chosen] if isinstance(chosen, Capacity) else chosen

    def estimate(self) -> int:
        """Bytes that capture will take on the device: the largest forward's activations and output, and the arena.

        Runs that forward once. Graphs share one pool and are captured from the largest down, so the others add little
        more than their kernels' descriptors.
        """
        total = self.arena_bytes
        for path, capacities in self._planned.items():
            if not capacities:
                continue
            largest = max(capacities, key=lambda capacity: capacity.units)
            before = torch.cuda.memory_allocated() if self._cuda else 0
            if self._cuda:
                torch.cuda.reset_peak_memory_stats()
            self.arena.zero_()
            output = self._forward(path, largest)
            peak = torch.cuda.max_memory_allocated() - before if self._cuda else 0
            total += peak + output.nbytes
        return total

    def capture(self, progress: Callable[[str, Capacity, int, int], None], *, on_failure: str) -> None:
        """Capture every planned graph, from the largest down. A failure raises, or leaves that capacity to eager.

        `progress(path, capacity, done, total)` is called after each.
        """
        total = sum(len(capacities) for capacities in self._planned.values())
        done = 0
        for path, capacities in self._planned.items():
            started = time.perf_counter()
            reserved = torch.cuda.memory_reserved() if self._cuda else 0
            captured = []
            ascending = sorted(capacities, key=lambda c: (c.units, c.segments * c.longest))
            for capacity in ascending[::-1]:  # and back again below: classes of one cost keep their order
                try:
                    captured.append(self._capture(path, capacity))
                except Exception as error:
                    if on_failure == "fail":
                        raise GraphsFailed(
                            f"capturing path {path} at {capacity.units} units failed: {error}. Run with "
                            "--on-capture-failure eager to serve such batches without a graph, or --no-graphs"
                        ) from error
                    log.warning(
                        "capture failed, this budget runs eagerly",
                        extra={"path": path, "budget": capacity.units, "segments": capacity.segments, "error": error},
                    )
                done += 1
                progress(path, capacity, done, total)
            state = self.paths[path]
            state.graphs = {graph.capacity: graph for graph in reversed(captured)}
            state.memory_bytes = torch.cuda.memory_reserved() - reserved if self._cuda else 0
            state.capture_s = time.perf_counter() - started

    def _forward(self, path: str, capacity: Capacity) -> torch.Tensor:
        packing = self._packings[path, capacity]
        return self.tower.forward(path, packing.tensors(self.arena), capacity)

    def _capture(self, path: str, capacity: Capacity) -> Graph:
        packing = self._packings[path, capacity]
        buffers = packing.tensors(self.arena)
        # The warm-up compiles kernels and makes library handles and workspaces, none of which may happen in a capture.
        # Zeros are defined input for every buffer: no segment, first patch, first table row.
        self.arena.zero_()
        warm = self.tower.forward(path, buffers, capacity)
        lines = warm.shape[0]
        if path not in self._outputs or len(self._outputs[path]) < lines:
            self._outputs[path] = torch.empty_like(warm)
        output = self._outputs[path][:lines]
        del warm

        def run() -> None:
            output.copy_(self.tower.forward(path, buffers, capacity))

        if not self._cuda:
            return Graph(capacity, buffers, packing, output, replay=run)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with no_collection(), torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        torch.cuda.synchronize()
        return Graph(capacity, buffers, packing, output, replay=graph.replay)
