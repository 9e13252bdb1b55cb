"""How near a replay comes to what the device allows: every budget of a tower beside its products and attention alone.

    opticnerve-server bench ceiling --model preset:qwen3-vl-8b --json ceiling.json

The ceiling of a budget is the sum of two times, each of a graph of its own: all matrix products of the captured forward
(as they were recorded, over the rows of the capacity, with the tower's weights, without what an epilogue adds), and its
attention over the same real segments, each kind of layer by whichever backend is the fastest there (cuDNN's dense
attention is one where all segments are of one length). A replay at the ceiling would do all else in no time. Each
budget is filled twice: by images of 441 tokens with one smaller image in what they leave, and by one image. Replays and
ceilings are times of the device alone, eager is one forward of the same batch by the host's clock.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from ..buffers import Packing
from ..graphs import Graph, GraphManager, eager_capacity
from ..models.base import ImageItem, PlanError, Tower
from ..models.grid import GridPlanner
from ..selftest import write_batch
from ..settings import ConfigError
from ..types import ItemPlan, Load
from . import plot
from .build import Built, add_flags, build, capture
from .progress import Progress
from .recorder import Attend, attention_runs, products_run, record
from .report import Figures, report
from .report import add_flags as add_report_flags
from .timing import captured, device_ms, host_times

IMAGE_TOKENS = 441
"""672 x 672 pixels of Qwen3-VL, 588 x 588 of Qwen2.5-VL."""

MANY, ONE = "images of 441", "one image"

TIE = 1.02
"""How much faster a replay must be to be the faster one: runs of one graph differ by as much."""

TRIES = 5
"""Repeats by which the fastest attention is chosen; it is then measured by as many as everything else."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What a captured forward would take if all but products and attention took no time."""

    products_ms: float
    attention_ms: float
    attention: str  # how often which backend over how many segments
    tflops: float  # of the products, in a second

    @property
    def ms(self) -> float:
        return self.products_ms + self.attention_ms


@dataclass(frozen=True, slots=True)
class Row:
    """One budget, filled in one way. Times in milliseconds."""

    budget: int
    filling: str  # MANY or ONE
    images: int
    tokens: int
    replay_ms: float
    products_ms: float
    attention_ms: float
    ceiling_ms: float
    attention: str
    tflops: float
    eager_ms: float


def measure_ceiling(built: Built, path: str, graph: Graph, repeats: int) -> Ceiling | None:
    """The ceiling of a captured forward whose static buffers hold a batch. Inference mode.

    None where attention does not go through the backends, as where all its segments are of one size.
    """
    tower = built.tower
    products, attends = record(tower, built.attention, path, graph.buffers, graph.capacity)
    if not attends:
        return None
    products_ms = device_ms(captured(products_run(products, tower.device), tower.device), tower.device, repeats)
    whole, said = 0.0, []
    for attend, layers in Counter(attends).items():
        name, run = fastest_attention(attend, layers, tower.device)
        whole += device_ms(run, tower.device, repeats)
        said.append(f"{layers} x {name} ({len(attend.lengths_q)})")
    flops = sum(product.flops for product in products)
    if tower.device.type == "cuda":
        torch.cuda.empty_cache()  # the pools of graphs that are gone
    return Ceiling(products_ms, whole, ", ".join(said), flops / products_ms / 1e9)


def fastest_attention(attend: Attend, layers: int, device: torch.device) -> tuple[str, Callable[[], object]]:
    """The name of the fastest attention over these segments, and its graph of so many layers."""
    graphs = {}
    for name, run in attention_runs(attend, layers, device)[0].items():
        try:
            graphs[name] = captured(run, device)
        except Exception as error:  # whatever a kernel does not take, another may
            print(f"{name} cannot attend {len(attend.lengths_q)} segments: {error}", file=sys.stderr)
    name = min(graphs, key=lambda name: device_ms(graphs[name], device, TRIES))
    return name, graphs[name]


def fillings(planner: GridPlanner, units: int) -> Iterator[tuple[str, list[list[ItemPlan]]]]:
    """How to fill a budget: a name, and batches in the order in which they fill it, the fullest first."""
    usual = image_of(planner, IMAGE_TOKENS)
    count = units // IMAGE_TOKENS
    if usual and usual.tokens == IMAGE_TOKENS and count:
        rest = image_of(planner, units - count * IMAGE_TOKENS)
        yield MANY, [[*[usual] * count, *([rest] if rest else [])], [usual] * count]
    whole = image_of(planner, units)
    if whole:
        yield ONE, [[whole]]


def image_of(planner: GridPlanner, tokens: int) -> ItemPlan | None:
    """The image, at most twice as wide as high, that has the most tokens up to so many; None if each has more."""
    side = planner.patch * planner.merge
    shapes = [(rows, min(2 * rows, tokens // rows)) for rows in range(1, int(tokens**0.5) + 1)]
    for rows, columns in sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[0]), reverse=True):
        try:
            plan = planner.plan(ImageItem(rows * side, columns * side))
        except PlanError:
            continue
        if plan.tokens <= tokens:
            return plan
    return None


def planner_of(built: Built) -> GridPlanner:
    """The planner of a tower of grids. Raises ConfigError for any other: its budgets are whole tiles."""
    planner = built.tower.planner
    if not isinstance(planner, GridPlanner):
        raise ConfigError(f"{built.source.name} cuts images into tiles: `bench paths` measures its paths")
    return planner


def measure(built: Built, planner: GridPlanner, graphs: GraphManager, repeats: int) -> list[Row]:
    """A row for every budget and filling. Inference mode."""
    (path,) = planner.paths
    budgets = graphs.paths[path].budgets
    rows, progress = [], Progress(len(budgets))
    for units in budgets:
        progress.step(f"budget {units}")
        for filling, batches in fillings(planner, units):
            for parts in batches:
                graph = graphs.choose(path, Load.of(part.paths[path] for part in parts))
                if isinstance(graph, Graph) and graph.capacity.units == units:
                    rows.append(_row(built, path, graphs, graph, filling, parts, repeats))
                    break
    progress.end()
    return rows


def _row(
    built: Built,
    path: str,
    graphs: GraphManager,
    graph: Graph,
    filling: str,
    parts: Sequence[ItemPlan],
    repeats: int,
) -> Row:
    tower = built.tower
    write_batch(tower, path, parts, graph.packing, graphs.arena, seed=0)
    ceiling = measure_ceiling(built, path, graph, repeats)
    assert ceiling is not None  # towers of grids attend by backends
    replay_ms = device_ms(graph.replay, tower.device, repeats)
    return Row(
        budget=graph.capacity.units,
        filling=filling,
        images=len(parts),
        tokens=sum(part.tokens for part in parts),
        replay_ms=replay_ms,
        products_ms=ceiling.products_ms,
        attention_ms=ceiling.attention_ms,
        ceiling_ms=ceiling.ms,
        attention=ceiling.attention,
        tflops=ceiling.tflops,
        eager_ms=eager_ms(tower, path, parts, repeats),
    )


def eager_ms(tower: Tower, path: str, parts: Sequence[ItemPlan], repeats: int) -> float:
    """Median milliseconds of the forward that runs where no graph does, host and device. Inference mode."""
    capacity = eager_capacity(tower.planner.paths[path], Load.of(part.paths[path] for part in parts))
    packing = Packing.of(tower.buffers(path, capacity))
    block = torch.empty(packing.size, dtype=torch.uint8, device=tower.device)
    buffers = write_batch(tower, path, parts, packing, block, seed=0)
    return host_times(lambda: tower.forward(path, buffers, capacity), tower.device, repeats).median


def crossing(rows: Sequence[Row]) -> int | None:
    """The least budget from which on no batch replays faster, by TIE, than eagerly; None if the largest does."""
    found = None
    for budget in sorted({row.budget for row in rows}, reverse=True):
        if any(TIE * row.replay_ms < row.eager_ms for row in rows if row.budget == budget):
            break
        found = budget
    return found


def markdown(figures: Figures) -> str:
    """The table, and what it says."""
    rows = [Row(**row) for row in figures["rows"]]
    lines = [
        f"{figures['model']}, {figures['device']}, torch {figures['torch']}, {figures['dtype']}, "
        f"attention {figures['attention']}, kernels {figures['kernels']}\n",
        "| budget | filled by | images | tokens | replay ms | products | attention | ceiling | replay / ceiling "
        "| eager ms | products TFLOP/s | fastest attention: layers x backend (segments) |",
        "|---|" + "---|" * 11,
    ]
    for row in rows:
        times = f"{row.replay_ms:.3f} | {row.products_ms:.3f} | {row.attention_ms:.3f} | {row.ceiling_ms:.3f}"
        lines.append(
            f"| {row.budget} | {row.filling} | {row.images} | {row.tokens} | {times} "
            f"| {row.replay_ms / row.ceiling_ms:.3f} | {row.eager_ms:.3f} | {row.tflops:.0f} | {row.attention} |"
        )
    for least, most in ((0, 511), (512, 2047), (2048, None)):
        ratios = [row.replay_ms / row.ceiling_ms for row in rows if least <= row.budget <= (most or row.budget)]
        if ratios:
            span = f"from {least}" + (f" to {most}" if most else " on")
            lines.append(f"\nBudgets {span}: replay / ceiling at most {max(ratios):.3f}.")
    cross = crossing(rows)
    said = f"From budget {cross} on eager is as fast." if cross else "Up to the largest budget a replay is faster."
    lines.append(f"\n{said}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="opticnerve-server bench ceiling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, "preset:qwen3-vl-8b")
    parser.add_argument("--budgets", nargs="+", type=int, metavar="N", help="by default all automatic ones")
    parser.add_argument("--max-token-budget", type=int, metavar="N", help="the largest automatic one")
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="whose median is taken. Default 30")
    add_report_flags(parser)
    options = parser.parse_args(arguments)

    def measured() -> Figures:
        with torch.inference_mode():
            built = build(options)
            planner = planner_of(built)
            explicit = {"": options.budgets} if options.budgets else {}
            graphs, _ = capture(built, options.max_token_budget, explicit)
            rows = measure(built, planner, graphs, options.repeats)
        return {**built.about, "rows": [asdict(row) for row in rows]}

    report("ceiling", options, measured, markdown, plot.ceiling)


if __name__ == "__main__":
    main()
