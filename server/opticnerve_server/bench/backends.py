"""The attention backends beside each other: the replay of a whole tower by each, on the device alone."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..attention import NAMES
from ..attention.flash_attn import installed
from ..graphs import Graph, GraphManager
from ..selftest import write_batch
from ..settings import ConfigError
from ..types import Load
from .batches import BATCHES
from .build import Built, build, tight
from .progress import Progress
from .timing import device_ms

SHOWN = ("1x336", "8x672", "1x2048")


@dataclass(frozen=True, slots=True)
class Row:
    """One backend: milliseconds of each of SHOWN, or why it cannot run here."""

    backend: str
    runs: str  # what that is here: auto's choice, flash_attn's package
    ms: list[float]
    start_s: float  # to build the tower and capture, compiling included
    missing: str = ""


def measure(options: argparse.Namespace, names: Sequence[str]) -> list[Row]:
    """A row for each of `names`. Inference mode."""
    rows, progress = [], Progress(len(names))
    for name in names:
        progress.step(name)
        started = time.perf_counter()
        try:
            built = build(options, name)
        except ConfigError as error:
            rows.append(Row(name, "", [], 0.0, str(error)))
            continue
        ms, start_s = _replays(built, options.repeats, started)
        rows.append(Row(name, _runs(built), ms, start_s))
    progress.end()
    return rows


def _runs(built: Built) -> str:
    name = built.attention.name
    if name != "flash_attn":
        return name
    found = installed(torch.cuda.get_device_capability(built.tower.device)[0])
    assert found is not None  # it runs
    return found.name


def _replays(built: Built, repeats: int, started: float) -> tuple[list[float], float]:
    """Graphs of exactly each of SHOWN, so that no backend pays for room that another has no use for."""
    tower = built.tower
    batches = [[tower.planner.plan(media) for media in BATCHES[name]] for name in SHOWN]
    loads = {path: [Load.of(plan.paths[path] for plan in plans) for plans in batches] for path in tower.planner.paths}
    capacities = {
        path: sorted(
            {tight(load) for load in each if load.units},
            key=lambda capacity: capacity.units,
        )
        for path, each in loads.items()
    }
    graphs = GraphManager(tower, capacities)
    graphs.capture(lambda *_: None, on_failure="fail")
    start_s = time.perf_counter() - started
    ms = [0.0] * len(SHOWN)
    for path, each in loads.items():
        for number, (plans, load) in enumerate(zip(batches, each, strict=True)):
            if load.units:
                graph = graphs.choose(path, load)
                assert isinstance(graph, Graph)
                write_batch(tower, path, plans, graph.packing, graphs.arena, seed=0)
                ms[number] += device_ms(graph.replay, tower.device, repeats)
    return ms, start_s


def markdown(rows: Sequence[Row]) -> str:
    """The table, and below it why others are not in it."""
    lines = [f"| backend | {' | '.join(f'{name} ms' for name in SHOWN)} | to start, s |", "|---|" + "---|" * 4]
    for row in rows:
        if not row.missing:
            name = row.backend if row.runs == row.backend else f"{row.backend} ({row.runs})"
            lines.append(f"| {name} | {' | '.join(f'{ms:.3f}' for ms in row.ms)} | {row.start_s:.1f} |")
    lines += [f"\n{row.backend}: {row.missing}" for row in rows if row.missing]
    return "\n".join(lines)


def add_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--attention-backends",
        nargs="*",
        choices=["auto", *NAMES],
        metavar="NAME",
        help="measure nothing but these attention backends, by default all, beside each other",
    )


def chosen(options: argparse.Namespace) -> list[str]:
    """The backends of the flag."""
    return list(options.attention_backends) or ["auto", *NAMES]
