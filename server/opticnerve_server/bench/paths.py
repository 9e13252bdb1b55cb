"""Milliseconds of each path of a tower alone, for batches of one image: replay of a graph beside an eager forward.

    python -m opticnerve_server.bench.paths --model preset:gemma-3-27b

The image has one size for all models, and each cuts it as its own processor does: 672 x 672 pixels are one tile of
Gemma 3, 2 x 2 tiles and an overview of InternVL and Llama 4, 441 tokens of Qwen3-VL. A path on which it leaves nothing
to do has no row. Graphs are captured for exactly these batches, so that no replay computes padding. A time begins with
the static buffers filled and ends when the device is done; `bench.tower` has whole calls, with copies and gather.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..buffers import Packing
from ..graphs import GraphManager, eager_capacity
from ..models.base import ImageItem, Tower
from ..selftest import write_batch
from ..types import ItemPlan, Load
from .build import add_flags, build, tight
from .images import size
from .timing import host_times


@dataclass(frozen=True, slots=True)
class Row:
    """One path of one batch."""

    path: str
    images: int
    units: int
    rows: int  # of the path's buffers: patches, class tokens
    replay_ms: float
    eager_ms: float


def measure(tower: Tower, image: ImageItem, counts: Sequence[int], repeats: int) -> list[Row]:
    """A row for every path and number of images, in their order. Call it in inference mode."""
    plan = tower.planner.plan(image)
    loads = {
        path: [Load.of([own] * count) for count in sorted(set(counts))] for path, own in plan.paths.items() if own.units
    }
    graphs = GraphManager(tower, {path: [tight(load) for load in own] for path, own in loads.items()})
    graphs.capture(lambda *_: None, on_failure="fail")
    return [
        Row(
            path=path,
            images=load.items,
            units=load.units,
            rows=load.units * tower.planner.paths[path].rows_per_unit,
            replay_ms=_replay_ms(graphs, path, load, plan, repeats),
            eager_ms=_eager_ms(tower, path, load, plan, repeats),
        )
        for path, own in loads.items()
        for load in own
    ]


def markdown(model: str, rows: Sequence[Row]) -> str:
    """The table."""
    lines = [
        "| model | path | images | units | rows | replay ms | eager ms | eager / replay |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = f"{row.replay_ms:.3f} | {row.eager_ms:.3f} | {row.eager_ms / row.replay_ms:.2f}"
        lines.append(f"| {model} | {row.path} | {row.images} | {row.units} | {row.rows} | {times} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, "preset:qwen3-vl-8b")
    parser.add_argument("--image", default=(672, 672), type=size, metavar="HEIGHTxWIDTH")
    parser.add_argument("--images", default=[1, 4, 16], type=int, nargs="+", metavar="N", help="how many in a batch")
    parser.add_argument("--repeats", default=30, type=int, metavar="N", help="whose median is taken")
    options = parser.parse_args(arguments)
    image = ImageItem(*options.image)
    with torch.inference_mode():
        built = build(options)
        tower = built.tower
        rows = measure(tower, image, options.images, options.repeats)
    spans = ", ".join(dict.fromkeys(span.kind for span in tower.planner.plan(image).spans))
    print(f"{built.about['device']}, torch {torch.__version__}, {options.dtype}; an image of {image.height} x ", end="")
    print(f"{image.width} pixels: {tower.planner.plan(image).tokens} tokens ({spans})\n")
    print(markdown(built.source.name, rows))


def _replay_ms(graphs: GraphManager, path: str, load: Load, plan: ItemPlan, repeats: int) -> float:
    graph = graphs.paths[path].graphs[tight(load)]
    write_batch(graphs.tower, path, [plan] * load.items, graph.packing, graphs.arena, seed=0)
    return host_times(graph.replay, graphs.tower.device, repeats).median


def _eager_ms(tower: Tower, path: str, load: Load, plan: ItemPlan, repeats: int) -> float:
    """As the dispatcher does without a graph."""
    capacity = eager_capacity(tower.planner.paths[path], load)
    packing = Packing.of(tower.buffers(path, capacity))
    block = torch.empty(packing.size, dtype=torch.uint8, device=tower.device)
    buffers = write_batch(tower, path, [plan] * load.items, packing, block, seed=0)
    return host_times(lambda: tower.forward(path, buffers, capacity), tower.device, repeats).median


if __name__ == "__main__":
    main()
