"""Milliseconds of one encode call in process, by a server's dispatch and by two others, and images a second.

    opticnerve-server bench tower --model preset:qwen3-vl-8b --random 24 --seconds 5

Every batch is one call. "slots" is a call as a server has it, from pixels in the slots to rows in the slots: host work
and both copies are in it, and more than one batch where one does not hold it. The other columns are times from when the
dispatcher has a batch whose pixels are on the device to when its rows are computed there, host work included: `ours`,
and what greedy packing and eager forwards take on the same kernels (`policies.py` has their rules). "replay" and
"ceiling" are of the device alone; `bench ceiling` has every budget and says what a ceiling is.

With --transformers its vision model runs beside them, with the same weights, pixels already patched and on the device;
`error` is the relative difference (norm ratio) of our rows to its. `bench paths` has the forwards of each path alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch

from ..config import CPU_TOKEN_CAP, GPU_TOKEN_CAP
from ..graphs import GraphManager
from ..selftest import self_test
from ..types import ItemPlan
from . import backends, plot, saturation
from .batches import BATCHES, STILLS, Media, random_batches
from .build import Built, add_flags, build, capture
from .calls import engine_of, measure, place, replay_and_ceiling
from .inprocess import InProcessEngine
from .policies import Policy, eager, greedy
from .progress import Progress
from .reference import Reference, measure_reference, reference
from .report import Figures, report
from .report import add_flags as add_report_flags
from .tables import tower_markdown

Engines = Sequence[tuple[Policy, InProcessEngine]]


def measure_rows(
    built: Built,
    graphs: GraphManager,
    engines: Engines,
    batches: Mapping[str, Sequence[Media]],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """A row for every batch; random ones by their policies alone. Inference mode."""
    run = reference(built.source, built.tensors) if options.transformers else None
    rows, progress = [], Progress(len(batches))
    for name, media in batches.items():
        progress.step(name)
        plans = [built.tower.planner.plan(item) for item in media]
        row: dict[str, Any] = {"batch": name, "images": len(plans), "tokens": sum(plan.tokens for plan in plans)}
        for policy, engine in engines:
            items = place(engine, policy, plans)
            row[policy.name] = measure(engine, items, options.repeats, landed_first=True)
            if policy.name == "ours" and name in BATCHES:
                row["slots"] = measure(engine, items, options.repeats, landed_first=False)
                if run:
                    ours = torch.cat([engine.rows(item) for item in items])
                    row |= _beside(run, built, plans, ours, options.repeats)
            engine.free(items)
        if name in BATCHES and (found := replay_and_ceiling(built, graphs, plans, options.repeats)):
            row["replay_ms"], row["ceiling_ms"] = found
        rows.append(row)
    progress.end()
    return rows


def _beside(
    run: Reference, built: Built, plans: Sequence[ItemPlan], rows: torch.Tensor, repeats: int
) -> dict[str, float]:
    ms, expected = measure_reference(run, built.tower.planner, plans, built.tower.device, repeats)
    return {"transformers_ms": ms, "error": float((rows.float() - expected.float()).norm() / expected.float().norm())}


def measure_tower(options: argparse.Namespace) -> Figures:
    """Build, capture, test and measure. Inference mode."""
    started = time.perf_counter()
    built = build(options)
    loaded = time.perf_counter()
    cap = options.max_token_budget or (GPU_TOKEN_CAP if options.device != "cpu" else CPU_TOKEN_CAP)
    graphs, capacities = capture(built, cap)
    captured = time.perf_counter()
    self_test(graphs, lambda path, capacity: None)
    figures: Figures = {
        **built.about,
        "budgets": sorted(
            capacity.units * built.tower.planner.paths[path].tokens_per_unit
            for path, planned in capacities.items()
            for capacity in planned
        ),
        "graphs": sum(len(state.graphs) for state in graphs.paths.values()),
        "load_s": loaded - started,
        "capture_s": captured - loaded,
        "selftest_s": time.perf_counter() - captured,
        "graph_mib": sum(state.memory_bytes for state in graphs.paths.values()) >> 20,
    }
    ours = Policy("ours", graphs, capacities, use_graphs=True)
    batches = {**{name: BATCHES[name] for name in options.batches}, **random_batches(options.random)}
    calls = [[built.tower.planner.plan(item) for item in media] for media in batches.values()]
    policies = [ours]
    if "greedy" in options.policies:
        policies.append(greedy(built, capacities, cap))
    if "eager" in options.policies:
        policies.append(eager(graphs, calls))
    with ExitStack() as stack:
        engines = [(policy, stack.enter_context(engine_of(built.tower, policy))) for policy in policies]
        figures["rows"] = measure_rows(built, graphs, engines, batches, options)
    if options.seconds:
        figures["images_s"] = {
            str(images): saturation.throughput(built, ours, images, options.seconds) for images in (1, 8)
        }
        host = saturation.host_time(built, options.seconds, options.repeats)
        figures["host"] = {**asdict(host), "between_ms": host.between_ms}
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="opticnerve-server bench tower", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser, "preset:qwen3-vl-8b")
    parser.add_argument("--max-token-budget", type=int, metavar="N", help="largest captured budget")
    parser.add_argument("--batches", nargs="*", default=STILLS, choices=list(BATCHES), metavar="NAME")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="beside so many random ones. Default 0")
    parser.add_argument("--policies", nargs="*", default=["greedy", "eager"], choices=["greedy", "eager"])
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="whose median is taken. Default 30")
    parser.add_argument(
        "--seconds", type=float, default=0.0, metavar="S", help="of each run that saturates the tower. Default 0: none"
    )
    parser.add_argument("--transformers", action="store_true", help="also run transformers' vision model")
    backends.add_flag(parser)
    add_report_flags(parser)
    options = parser.parse_args(arguments)
    names = options.attention_backends

    def measured() -> Figures:
        with torch.inference_mode():
            if names is not None:
                return {"backends": [asdict(row) for row in backends.measure(options, backends.chosen(options))]}
            return measure_tower(options)

    report("tower", options, measured, tower_markdown, plot.tower)


if __name__ == "__main__":
    main()
