"""One device against several of one host, in whole calls: opticnerve-server bench scaling --model DIR

Two servers run side by side, one on the first device, one on all that --devices names, and the same callers try both:

- mixed and 336: saturated by many calls of four images each, of mixed sizes or all of 336 x 336; one server at a time;
- 20x336 and 1x224: one call of so many images after another, in turn to either server;
- equal: rows of one image that ran in the same budget are compared, whatever the device and the company.

`call` is what a caller waits; `ready` ends when the last rows are in host memory, before they are streamed. Images are
raw noise, and equal ones are not shared (--store-bytes 0). `busy` is the share of the time that the devices computed,
and `imbalance` the longest over the mean: where `busy` is well below 1, front-ends or callers are the limit, and more
of either help while there are cores (--frontends, --callers).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from threading import Barrier
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

import opticnerve

from ..config import Config
from ..devices import devices_of
from ..local import LocalServer

MIXED = (224, 336, 448, 672, 896, 1120, 1344)
SATURATING = 4
"""Images in each of the calls that saturate."""
ONE_BY_ONE = {"20x336": (20, 336), "1x224": (1, 224)}
"""Images of a call, and their side."""
RUNS = ("mixed", "336", *ONE_BY_ONE, "equal")

WARM_UP = 3
"""Calls that do not count."""
COMPARED = 8
"""Calls of each side whose rows are compared."""
TIMEOUT_S = 600.0

Images = list[npt.NDArray[np.uint8]]
Values = dict[str, float]


@dataclass(frozen=True, slots=True)
class Load:
    """What one process of callers does to saturate a server."""

    address: str
    sides: Sequence[int]
    concurrency: int  # calls at a time
    seconds: float
    seed: int
    start: Barrier  # of all processes and the bench


@dataclass(frozen=True, slots=True)
class Row:
    """One value of one device, and of several."""

    graphs: bool
    run: str
    name: str
    one: float
    several: float

    def __str__(self) -> str:
        ratio = f"{self.several / self.one:>8.3f}x" if self.one else ""
        mode = "replay" if self.graphs else "eager"
        return f"{mode:<7} {self.run:<7} {self.name:<14} {self.one:>12.3f} {self.several:>12.3f} {ratio}".rstrip()


def noise(side: int) -> npt.NDArray[np.uint8]:
    """The image of this side, the same in every process."""
    return np.random.default_rng(side).integers(0, 256, (side, side, 3), np.uint8)


def _client(address: str) -> opticnerve.AsyncClient:
    return opticnerve.AsyncClient(address, timeout=TIMEOUT_S)


# --- saturated


def call_for(load: Load) -> tuple[int, int, float]:
    """Images, tokens and seconds of a process of callers."""
    return asyncio.run(_call_for(load))


async def _call_for(load: Load) -> tuple[int, int, float]:
    pictures = [noise(side) for side in load.sides]
    chosen = itertools.cycle(np.random.default_rng(load.seed).integers(0, len(pictures), 256))
    tokens: list[int] = []

    async with _client(load.address) as client:

        async def one() -> None:
            images = [pictures[next(chosen)] for _ in range(SATURATING)]
            tokens.append(sum([embedding.tokens async for embedding in client.encode(images)]))

        async def caller() -> None:
            while time.monotonic() < began + load.seconds:
                await one()

        for _ in range(WARM_UP):
            await one()
        tokens.clear()
        load.start.wait(TIMEOUT_S)
        began = time.monotonic()
        await asyncio.gather(*(caller() for _ in range(load.concurrency)))
        return len(tokens) * SATURATING, sum(tokens), time.monotonic() - began


def saturate(server: LocalServer, devices: Sequence[int], sides: Sequence[int], callers: Callers) -> Values:
    """Throughput with more calls inside than the devices can take."""
    each = -(-callers.inside * len(devices) // callers.processes)
    load = Load(server.address, sides, each, callers.seconds, 0, callers.start)
    answers = callers.pool.map(call_for, [replace(load, seed=seed) for seed in range(callers.processes)])
    names = [("opticnerve_device_busy_seconds_total", {"device": str(device)}) for device in devices]
    callers.start.wait(TIMEOUT_S)
    before = server.totals(*names)
    images, tokens, seconds = zip(*answers, strict=True)
    busy = [after - earlier for after, earlier in zip(server.totals(*names), before, strict=True)]
    return {
        "images/s": sum(images) / max(seconds),
        "tokens/s": sum(tokens) / max(seconds),
        "busy": statistics.mean(busy) / max(seconds),
        "imbalance": max(busy) / statistics.mean(busy),
    }


class Callers:
    """Processes of callers, as a context."""

    def __init__(self, processes: int, inside: int, seconds: float) -> None:
        """`inside`: calls for each device; `seconds` of a run."""
        self.processes, self.inside, self.seconds = processes, inside, seconds

    def __enter__(self) -> Self:
        context = get_context("spawn")
        self._stack = ExitStack()
        self.start = self._stack.enter_context(context.Manager()).Barrier(self.processes + 1)
        self.pool = self._stack.enter_context(ProcessPoolExecutor(self.processes, context))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()


# --- one call at a time


async def one_by_one(addresses: Sequence[str], images: Images, calls: int) -> list[Values]:
    """Latencies in milliseconds, by server; no two calls are inside at a time."""
    whole: list[list[float]] = [[] for _ in addresses]
    ready: list[list[float]] = [[] for _ in addresses]
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_client(address)) for address in addresses]
        for turn, (number, client) in itertools.product(range(-WARM_UP, calls), enumerate(clients)):
            began = time.perf_counter()
            timings = [embedding.timings async for embedding in client.encode(images)]
            ended = time.perf_counter()
            if turn >= 0:
                whole[number].append(1e3 * (ended - began))
                ready[number].append(1e3 * max(each.total - each.stream for each in timings))
    return [_latencies("call", calls) | _latencies("ready", there) for calls, there in zip(whole, ready, strict=True)]


def _latencies(name: str, milliseconds: Sequence[float]) -> Values:
    return {
        f"{name} mean ms": statistics.mean(milliseconds),
        f"{name} p50 ms": statistics.median(milliseconds),
        f"{name} p99 ms": statistics.quantiles(milliseconds, n=100)[98],
    }


# --- equal rows

Seen = dict[tuple[int, int], dict[tuple[int, int], set[bytes]]]
"""Digests of rows, by side and budget (units of the forward where it was eager), then by server and device."""


async def compare(addresses: Sequence[str]) -> Seen:
    """The rows of the same images from every device, in batches as they come: two calls of equal images at a time."""
    seen: Seen = defaultdict(lambda: defaultdict(set))

    async def call(server: int, client: opticnerve.AsyncClient, side: int) -> None:
        async for embedding in client.encode([noise(side)] * SATURATING):
            (dispatch,) = embedding.dispatches
            batch = side, dispatch.budget or dispatch.batch_units
            seen[batch][server, dispatch.device].add(sha256(embedding.array.tobytes()).digest())

    for server, address in enumerate(addresses):
        async with _client(address) as client:
            sides = iter(COMPARED * MIXED)
            for pair in zip(sides, sides, strict=True):
                await asyncio.gather(*(call(server, client, side) for side in pair))
    return seen


def equality(seen: Seen, devices: Sequence[tuple[int, int]]) -> Values:
    """How many combinations of image and budget ran on every one of these devices, and for how many rows differ."""
    common = [[by[device] for device in devices] for by in seen.values() if by.keys() >= set(devices)]
    return {"compared": len(common), "differing": sum(len(set.union(*digests)) > 1 for digests in common)}


# --- all


def measure(config: Config, devices: Sequence[int], given: argparse.Namespace) -> Iterator[Row]:
    """The rows of the table, each run as soon as it is over."""
    both = [devices[:1], devices]
    configs = [replace(config, devices=",".join(map(str, numbers))) for numbers in both]
    with ExitStack() as stack:
        callers = stack.enter_context(Callers(given.callers, given.inside, given.seconds))
        with ThreadPoolExecutor() as starting:
            servers = list(starting.map(stack.enter_context, map(LocalServer, configs)))
        addresses = [server.address for server in servers]
        for run in given.runs:
            if run in ONE_BY_ONE:
                images, side = ONE_BY_ONE[run]
                one, several = asyncio.run(one_by_one(addresses, [noise(side)] * images, given.calls))
            elif run == "equal":
                seen = asyncio.run(compare(addresses))
                alone = [(0, devices[0])]
                one, several = equality(seen, alone), equality(seen, [*alone, *((1, number) for number in devices)])
            else:
                sides = MIXED if run == "mixed" else [int(run)]
                one, several = (saturate(*each, sides, callers) for each in zip(servers, both, strict=True))
            yield from (Row(config.graphs, run, name, one[name], several[name]) for name in one)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="opticnerve-server bench scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--devices", default="all", help="of the second server; the first has the first of them")
    parser.add_argument("--graphs", nargs="+", choices=["on", "off"], default=["on", "off"], help="of both servers")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS, help="which to measure. Default all")
    parser.add_argument("--frontends", type=int, default=12, metavar="N", help="of each server. Default 12")
    parser.add_argument("--preprocess-threads", type=int, default=4, metavar="N", help="of a front-end. Default 4")
    parser.add_argument("--callers", type=int, default=12, metavar="N", help="processes that saturate. Default 12")
    parser.add_argument("--inside", type=int, default=64, metavar="N", help="calls, for each device. Default 64")
    parser.add_argument("--seconds", type=float, default=12.0, metavar="S", help="of a saturated run. Default 12")
    parser.add_argument("--calls", type=int, default=1000, metavar="N", help="of a run of latencies. Default 1000")
    parser.add_argument("--queue-bytes", type=int, default=16 << 30, metavar="N", help="of each server. Default 16 GiB")
    parser.add_argument("--json", metavar="FILE", help="write the table to this file, after each run anew")
    given = parser.parse_args(arguments)
    config = Config(
        model=given.model,
        load_format=given.load_format,
        device=given.device,
        devices=given.devices,
        frontends=given.frontends,
        preprocess_threads=given.preprocess_threads,
        store_bytes=0,
        max_queue_bytes=given.queue_bytes,
        max_queue_items=4096,
    )
    devices = devices_of(config)
    if len(devices) < 2:
        parser.error(f"there is nothing to compare on {len(devices)} device: name more with --devices")
    print(f"{given.model}: device {devices[0]}, then {', '.join(map(str, devices))}")
    rows: list[Row] = []
    for mode in given.graphs:
        for row in measure(replace(config, graphs=mode == "on"), devices, given):
            print(row, flush=True)
            rows.append(row)
            if given.json:
                Path(given.json).write_text(json.dumps([asdict(each) for each in rows], indent=1))


if __name__ == "__main__":
    main()
