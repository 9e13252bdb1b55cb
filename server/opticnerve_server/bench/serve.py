"""What a server does under load through real gRPC: latency, throughput, hits, padding and where the time goes.

    opticnerve-server bench serve --model preset:qwen2.5-vl-7b --load-format dummy

A server of its own on loopback, without a store, and callers in processes of their own. First as many calls at once as
saturate it, which gives its capacity; then calls at random times (a Poisson process) at shares of that rate, whether or
not earlier ones are answered. A latency runs from when a call was due to when the client has all its rows. Every call
has images of its own. Hits, padding, the busy share of the device and the stages are differences of the server's
metrics over a run.

    opticnerve-server bench serve --from serve.json --plot serve.svg     # where matplotlib is, with what --json wrote
"""

from __future__ import annotations

import argparse
import asyncio
import math
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing.synchronize import Barrier

import opticnerve

from ..config import Config, load
from ..local import LocalServer
from ..metrics import Stage
from ..models import registry
from ..settings import add_flags
from . import plot
from .images import jpeg, size
from .progress import Progress
from .report import Figures, report
from .report import add_flags as add_report_flags

IMAGES = 32
"""Different images of each size; the server has no store, so that none is remembered."""

START_S = 0.5
"""From the order to the first call, so that all processes begin at once."""

TIMEOUT_S = 60.0

METRICS: dict[str, tuple[str, dict[str, str]]] = {
    "hit": ("opticnerve_dispatches_total", {"outcome": "hit"}),
    "dispatches": ("opticnerve_dispatches_total", {}),
    "useful": ("opticnerve_graph_tokens_total", {"kind": "useful"}),
    "computed": ("opticnerve_graph_tokens_total", {}),
    "busy_s": ("opticnerve_execute_duration_seconds_sum", {}),
    **{f"{stage} s": ("opticnerve_stage_duration_seconds_sum", {"stage": stage}) for stage in Stage},
    **{f"{stage} n": ("opticnerve_stage_duration_seconds_count", {"stage": stage}) for stage in Stage},
}


@dataclass(frozen=True, slots=True)
class Order:
    """What one process of callers does. `rate` calls a second, or 0: `callers` of them one call after another."""

    address: str
    images: list[bytes]
    items: int  # of a call
    rate: float
    callers: int
    begin: float  # time.time()
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class Run:
    """One rate: latencies in milliseconds, shares from 0 to 1, means of stages in milliseconds an item."""

    share: float  # of the capacity that was asked for; 0: as many as it takes
    calls: int
    failed: int
    items_s: float
    tokens_s: float
    megabytes_s: float
    p50: float
    p90: float
    p99: float
    hit: float
    padding: float
    busy: float
    stages: dict[str, float]


async def _call(order: Order) -> list[tuple[float, float, int, int]]:
    """(due, end, tokens, bytes) of every call that was due in time; tokens are 0 if it failed."""
    draw, ended = random.Random(order.seed), []

    async def one(client: opticnerve.AsyncClient, due: float) -> None:
        try:
            rows = [row async for row in client.encode(draw.choices(order.images, k=order.items))]
            answer = sum(row.tokens for row in rows), sum(row.array.nbytes for row in rows)
        except opticnerve.OpticnerveError:
            answer = 0, 0
        ended.append((due, time.time(), *answer))

    async def caller(client: opticnerve.AsyncClient) -> None:
        while (now := time.time()) < order.begin + order.seconds:
            await one(client, now)

    async with opticnerve.AsyncClient(order.address, timeout=TIMEOUT_S) as client:
        await one(client, -math.inf)  # connected
        await asyncio.sleep(order.begin - time.time())
        if not order.rate:
            await asyncio.gather(*(caller(client) for _ in range(order.callers)))
            return ended
        due, tasks = order.begin + draw.expovariate(order.rate), []
        while due < order.begin + order.seconds:
            await asyncio.sleep(max(0.0, due - time.time()))
            tasks.append(asyncio.create_task(one(client, due)))
            due += draw.expovariate(order.rate)
        await asyncio.gather(*tasks)
    return ended


def calls(order: Order) -> list[tuple[float, float, int, int]]:
    """The life of a process of callers."""
    return [call for call in asyncio.run(_call(order)) if call[0] >= order.begin]


class Callers(ProcessPoolExecutor):
    """Processes of callers, all of which have started and imported what they need when this is made."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        super().__init__(count, context, _keep, (context.Barrier(count),))
        list(self.map(_meet, range(count)))


_meeting: list[Barrier] = []


def _keep(barrier: Barrier) -> None:
    _meeting.append(barrier)


def _meet(_: int) -> None:
    _meeting[0].wait()


def measure(server: LocalServer, pool: Callers, order: Order, processes: int, share: float) -> Run:
    """One run; `order.rate` and `order.callers` are those of all processes together."""
    begin = time.time() + START_S + 0.05 * processes
    each = [
        replace(order, rate=order.rate / processes, callers=-(-order.callers // processes), begin=begin, seed=seed)
        for seed in range(processes)
    ]
    answers = pool.map(calls, each)
    time.sleep(max(0.0, begin - time.time()))
    before = dict(zip(METRICS, server.totals(*METRICS.values()), strict=True))
    done = [call for own in answers for call in own]
    after = dict(zip(METRICS, server.totals(*METRICS.values()), strict=True))
    grown = {name: after[name] - before[name] for name in METRICS}
    elapsed = max((end for _, end, _, _ in done), default=begin + order.seconds) - begin
    good = [call for call in done if call[2]]
    latencies = sorted((end - due) * 1e3 for due, end, _, _ in good) or [math.nan]
    return Run(
        share=share,
        calls=len(done),
        failed=len(done) - len(good),
        items_s=len(good) * order.items / elapsed,
        tokens_s=sum(call[2] for call in good) / elapsed,
        megabytes_s=sum(call[3] for call in good) / elapsed / 1e6,
        p50=statistics.median(latencies),
        p90=latencies[len(latencies) * 90 // 100],
        p99=latencies[len(latencies) * 99 // 100],
        hit=grown["hit"] / max(1, grown["dispatches"]),
        padding=1 - grown["useful"] / max(1, grown["computed"]),
        busy=grown["busy_s"] / elapsed,
        stages={stage: 1e3 * grown[f"{stage} s"] / max(1, grown[f"{stage} n"]) for stage in Stage},
    )


def markdown(figures: Figures) -> str:
    """The two tables: what callers saw, and where the time went."""
    runs = [Run(**run) for run in figures["runs"]]
    lines = [f"{figures['model']}, {figures['about']}", ""]
    lines += ["| load | items/s | tokens/s | MB/s | p50 ms | p90 | p99 | failed | hit | padding | device busy |"]
    lines += ["|---|" + "---|" * 10]
    for run in runs:
        load = f"{run.share:.0%}" if run.share else "saturated"
        speed = f"{run.items_s:.1f} | {run.tokens_s:.0f} | {run.megabytes_s:.1f}"
        times = f"{run.p50:.1f} | {run.p90:.1f} | {run.p99:.1f} | {run.failed}"
        lines.append(f"| {load} | {speed} | {times} | {run.hit:.0%} | {run.padding:.0%} | {run.busy:.0%} |")
    lines += ["", f"| load | {' | '.join(f'{stage} ms' for stage in Stage)} |", "|---|" + "---|" * len(Stage)]
    for run in runs:
        load = f"{run.share:.0%}" if run.share else "saturated"
        lines.append(f"| {load} | {' | '.join(f'{run.stages[stage]:.2f}' for stage in Stage)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="opticnerve-server bench serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--sizes", nargs="+", default=[(336, 336)], type=size, metavar="HEIGHTxWIDTH", help="drawn alike"
    )
    parser.add_argument("--items", type=int, default=1, metavar="N", help="images of a call. Default 1")
    parser.add_argument("--loads", nargs="*", type=float, default=[0.2, 0.5, 0.8], help="shares of the capacity")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="of each run. Default 10")
    parser.add_argument("--callers", type=int, default=64, metavar="N", help="at once, to saturate it. Default 64")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 3), help="of callers")
    add_report_flags(parser)
    add_flags(parser, Config)
    options = parser.parse_args(arguments)
    report("serve", options, lambda: measure_serve(options, parser), markdown, plot.serve)


def measure_serve(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Figures:
    """A server and its callers, saturated and at every load. Raises ConfigError and ModelError."""
    given = {field.name: getattr(options, field.name) for field in fields(Config) if hasattr(options, field.name)}
    config = replace(load(given, os.environ).config, store_bytes=0)
    registry.open_model(config.model, config.load_format, projector=config.projector)  # the cheapest mistakes first
    images = [jpeg(height, width, seed) for height, width in options.sizes for seed in range(IMAGES)]
    runs: list[Run] = []
    progress = Progress(1 + len(options.loads))
    with LocalServer(config) as server, Callers(options.processes) as pool:
        order = Order(server.address, images, options.items, 0, options.callers, 0, options.seconds, 0)
        for share in (0.0, *options.loads):
            rate = share * runs[0].items_s / options.items if runs else 0.0
            progress.step(f"{share:.0%} of the capacity" if share else "saturated")
            runs.append(measure(server, pool, replace(order, rate=rate), options.processes, share))
            if not runs[0].items_s:
                parser.error(
                    f"none of {runs[0].calls} calls succeeded: try one by `opticnerve encode --server` against `serve`"
                )
    progress.end()
    shown = ", ".join(f"{height}x{width}" for height, width in options.sizes)
    callers = f"{options.processes} processes of callers, {os.cpu_count()} cores"
    about = f"{options.items} images a call of {shown} pixels, {callers}"
    return {"model": config.model, "about": about, "runs": [asdict(run) for run in runs]}


if __name__ == "__main__":
    main()
