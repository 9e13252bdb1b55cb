"""One device against several of one host, in whole calls: opticnerve-server bench scaling --model DIR

Starts a server on the first device, then one on all that --devices names, and tries both with the same callers:

- saturated, many calls of four images each inside, of mixed sizes and all of 336 x 336: images and tokens a second;
- one call of 20 images of 336 x 336 after another: mean and 99th percentile;
- one small image, 224 x 224, after another: the median.

Images are raw noise, and equal ones are not shared (--store-bytes 0). `busy` is the share of the time that the
devices computed, and `imbalance` the longest over the mean: where `busy` is well below 1, front-ends or callers are the
limit, and more of either help while there are cores (--frontends, --callers).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

import opticnerve

from ..config import Config
from ..local import LocalServer

MIXED = (224, 336, 448, 672, 896, 1120, 1344)
SATURATING = 4
"""Images in each of the calls that saturate."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one process of callers does."""

    address: str
    sides: Sequence[int]
    images: int  # a call
    concurrency: int  # calls at a time
    seconds: float
    calls: int | None = None  # at most; None: until the time is over


@dataclass(frozen=True, slots=True)
class Told:
    """What came of it, warm-up left out."""

    latencies: list[float]
    images: int
    tokens: int
    seconds: float


def call_forever(load: Load, seed: int) -> Told:
    """The life of a process of callers."""
    return asyncio.run(_call_forever(load, seed))


async def _call_forever(load: Load, seed: int) -> Told:
    rng = np.random.default_rng(seed)
    noise = {side: rng.integers(0, 256, (side, side, 3), np.uint8) for side in set(load.sides)}
    order = [noise[side] for side in rng.choice(np.array(load.sides), 256)]
    turns = itertools.count(0, load.images)
    latencies: list[float] = []
    images = tokens = 0

    async with opticnerve.AsyncClient(load.address, timeout=600) as client:

        async def one() -> None:
            nonlocal images, tokens
            at = next(turns)
            chosen = [order[(at + offset) % len(order)] for offset in range(load.images)]
            began = time.perf_counter()
            count = 0
            async for embedding in client.encode(chosen):
                count += embedding.tokens
            latencies.append(time.perf_counter() - began)
            images, tokens = images + load.images, tokens + count

        async def caller() -> None:
            while time.perf_counter() < until and (load.calls is None or len(latencies) < load.calls):
                await one()

        for _ in range(3):
            await one()
        latencies.clear()
        images = tokens = 0
        began = time.perf_counter()
        until = began + load.seconds
        await asyncio.gather(*(caller() for _ in range(load.concurrency)))
        return Told(latencies, images, tokens, time.perf_counter() - began)


def saturate(server: LocalServer, sides: Sequence[int], options: argparse.Namespace, devices: int) -> dict[str, float]:
    """Throughput with more calls inside than the devices can take."""
    load = Load(server.address, sides, SATURATING, -(-options.inside * devices // options.callers), options.seconds)
    names = [("opticnerve_device_busy_seconds_total", {"device": str(device)}) for device in range(devices)]
    with multiprocessing.get_context("spawn").Pool(options.callers) as pool:
        before = server.totals(*names)
        told = pool.starmap(call_forever, [(load, seed) for seed in range(options.callers)])
        busy = [after - earlier for after, earlier in zip(server.totals(*names), before, strict=True)]
    return {
        "images/s": sum(each.images / each.seconds for each in told),
        "tokens/s": sum(each.tokens / each.seconds for each in told),
        "busy": statistics.mean(busy) / max(each.seconds for each in told),
        "imbalance": max(busy) / statistics.mean(busy),
    }


def one_by_one(server: LocalServer, side: int, images: int, calls: int) -> dict[str, float]:
    """Latencies of calls of which no two are inside at a time, in milliseconds."""
    told = call_forever(Load(server.address, [side], images, 1, 600.0, calls), seed=0)
    latencies = [1e3 * seconds for seconds in told.latencies]
    return {
        "mean ms": statistics.mean(latencies),
        "p50 ms": statistics.median(latencies),
        "p99 ms": statistics.quantiles(latencies, n=100)[98],
    }


def measure(config: Config, devices: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    count = len(devices.split(","))
    with LocalServer(replace(config, devices=devices)) as server:
        return {
            "mixed": saturate(server, MIXED, options, count),
            "336": saturate(server, [336], options, count),
            "20 x 336": one_by_one(server, 336, 20, options.calls),
            "1 x 224": one_by_one(server, 224, 1, options.calls),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--devices", default="0,1", help="the devices of the second server; the first has 0 alone")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--frontends", type=int, default=8)
    parser.add_argument("--callers", type=int, default=8, help="processes")
    parser.add_argument("--inside", type=int, default=64, help="calls inside for each device, when saturated")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each saturated run")
    parser.add_argument("--calls", type=int, default=1000, help="of each run of latencies")
    parser.add_argument("--queue-bytes", type=int, default=16 << 30, help="--max-queue-bytes of the servers")
    options = parser.parse_args(arguments)
    config = Config(
        model=options.model,
        load_format=options.load_format,
        device=options.device,
        graphs=not options.no_graphs,
        frontends=options.frontends,
        preprocess_threads=2,
        store_bytes=0,
        max_queue_bytes=options.queue_bytes,
        max_queue_items=4096,
    )
    one, several = (measure(config, devices, options) for devices in ("0", options.devices))
    print(f"{options.model}, graphs {'off' if options.no_graphs else 'on'}: device 0, then {options.devices}")
    for run, values in one.items():
        for name, value in values.items():
            other = several[run][name]
            print(f"{run:<9} {name:<10} {value:>12.3f} {other:>12.3f} {other / value:>8.3f}x")


if __name__ == "__main__":
    main()
