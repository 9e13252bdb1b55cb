"""`opticnerve-server soak`: random calls, good and bad, against a server of its own; every answer is checked.

The expected rows are those of the same tower run eagerly in this process, one item at a time. Calls are drawn with a
seed: media of many sizes, duplicates, broken files, bombs, callers that cancel, run out of time, read slowly, hold rows
and fetch them. At the end everything that was let in must have left, and memory and file descriptors must be what they
were.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import io
import random
import statistics
import sys
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

import opticnerve
from opticnerve import errors
from opticnerve.tensors import DtypeName

from .config import Config
from .local import LocalServer
from .media.decode import decode
from .models.base import ImageItem

STILLS = 48
SMALLEST, LARGEST = 33, 420
"""Sides of the images, in pixels. Now and then one is larger than every automatic budget of a CPU."""

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}
"""Of rows to their reference, a ratio of norms, by the tower's dtype; the dtype of the rows adds its own rounding."""
ROUNDING = {"float32": 0.0, "bfloat16": 4e-3, "float16": 1e-3}

BYTES_GROWN = 16 << 20
"""More than this between the third and the last quarter of a run is a leak."""

TIMEOUT_S = 60.0


class Wrong(AssertionError):
    """The server has done what it must not do."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """An image to send, and the rows that it becomes: float32 [tokens, width]."""

    source: bytes | npt.NDArray[np.uint8]
    size: tuple[int, int]
    rows: npt.NDArray[np.float32]


@dataclass(slots=True)
class Soak:
    """One run against a server that listens on `address`; `calls` counts what was called, by kind and outcome."""

    address: str
    samples: list[Sample]
    tolerance: float
    random: random.Random
    calls: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def run(self, *, calls: int, seconds: float, concurrency: int, report: Callable[[int], None]) -> None:
        """Call until `calls` are made, or `seconds` are over."""
        until, numbers = time.monotonic() + seconds, iter(range(calls))
        kinds = list(KINDS)
        weights = [KINDS[kind] for kind in kinds]

        async def caller(client: opticnerve.AsyncClient) -> None:
            for number in numbers:
                if time.monotonic() > until:
                    return
                (kind,) = self.random.choices(kinds, weights)
                await self._call(kind, client)
                report(number)

        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(opticnerve.AsyncClient(self.address, timeout=TIMEOUT_S))
                for _ in range(4)
            ]
            await asyncio.gather(*(caller(clients[number % len(clients)]) for number in range(concurrency)))

    async def _call(self, kind: str, client: opticnerve.AsyncClient) -> None:
        action: Callable[[opticnerve.AsyncClient], Awaitable[str]] = getattr(self, kind)
        try:
            outcome = await action(client)
        except errors.QueueFullError:
            outcome = "queue full"
        except Exception as error:  # whatever it is, it is the verdict
            outcome = "WRONG"
            self.wrong.append(f"{kind}: {type(error).__name__}: {error}")
        self.calls[f"{kind}: {outcome}"] += 1

    def _draw(self, most: int = 5) -> list[Sample]:
        return self.random.choices(self.samples, k=self.random.randint(1, most))

    def _check(self, sample: Sample, embedding: opticnerve.Embedding) -> None:
        rows = embedding.array.astype(np.float32)
        if rows.shape != sample.rows.shape:
            raise Wrong(f"an image of {sample.size} has {rows.shape} numbers, {sample.rows.shape} were expected")
        off = float(np.linalg.norm(rows - sample.rows) / np.linalg.norm(sample.rows))
        if not off <= self.tolerance + ROUNDING[embedding.array.dtype.name]:
            how = f"{embedding.array.dtype}, {embedding.outcome}"
            raise Wrong(f"an image of {sample.size} is off by {off:.1e} ({how})")

    # --- what callers do

    async def good(self, client: opticnerve.AsyncClient) -> str:
        """Some images, in any dtype; all must be right, and in order."""
        drawn = self._draw()
        dtypes: tuple[DtypeName, ...] = ("bfloat16", "float32")
        sources = [sample.source for sample in drawn]
        embeddings = [one async for one in client.encode(sources, dtype=self.random.choice(dtypes))]
        for sample, embedding in zip(drawn, embeddings, strict=True):
            self._check(sample, embedding)
        return "ok"

    async def broken(self, client: opticnerve.AsyncClient) -> str:
        """Files that cannot be decoded among good ones, which must not suffer."""
        drawn: list[Sample | bytes] = [*self._draw(3), self._garbage(), self._garbage()]
        self.random.shuffle(drawn)
        sources = [one.source if isinstance(one, Sample) else one for one in drawn]
        answers = [answer async for answer in client.encode(sources, return_errors=True)]
        for sent, answer in zip(drawn, answers, strict=True):
            if isinstance(sent, bytes):
                if not isinstance(answer, errors.ImageInvalidError):
                    raise Wrong(f"a broken file is answered {answer}")
            elif isinstance(answer, opticnerve.ServerError):
                raise answer
            else:
                self._check(sent, answer)
        return "ok"

    async def cancelled(self, client: opticnerve.AsyncClient) -> str:
        """A caller that goes away, at any moment."""

        async def encode() -> None:
            async for _ in client.encode([sample.source for sample in self._draw()]):
                pass

        task = asyncio.create_task(encode())
        await asyncio.sleep(self.random.uniform(0, 0.2))
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return "cancelled"
        return "ok"

    async def hurried(self, client: opticnerve.AsyncClient) -> str:
        """A caller without time."""
        drawn = self._draw()
        try:
            sources = [sample.source for sample in drawn]
            embeddings = [one async for one in client.encode(sources, timeout=self.random.uniform(0.001, 0.2))]
        except errors.DeadlineExceededError:
            return "expired"
        for sample, embedding in zip(drawn, embeddings, strict=True):
            self._check(sample, embedding)
        return "ok"

    async def slow(self, client: opticnerve.AsyncClient) -> str:
        """A caller that takes its time between items."""
        drawn = self._draw()
        position = 0
        async for embedding in client.encode([sample.source for sample in drawn]):
            self._check(drawn[position], embedding)
            position += 1
            await asyncio.sleep(self.random.uniform(0, 0.3))
        return "ok" if position == len(drawn) else "short"

    async def oversized(self, client: opticnerve.AsyncClient) -> str:
        """A picture that would take gigabytes to decode, and a call of more items than the server ever holds."""
        if self.random.random() < 0.5:
            [answer] = [one async for one in client.encode([bomb()], return_errors=True)]
            if not isinstance(answer, errors.ImageInvalidError):
                raise Wrong(f"a bomb is answered {answer}")
            return "refused"
        pixel = np.zeros((1, 1, 3), np.uint8)
        try:
            async for _ in client.encode([pixel] * 5000):
                pass
        except errors.RequestTooLargeError:
            return "refused"
        raise Wrong("a call of 5000 items is let in")

    async def held(self, client: opticnerve.AsyncClient) -> str:
        """One caller has rows kept, others fetch them."""
        [sample] = self._draw(1)
        try:
            [held] = await client.hold([sample.source], ttl=20)
        except errors.StoreFullError:
            return "store full"
        for _ in range(2):
            [fetched] = [one async for one in client.encode([opticnerve.Digest(held.digest)])]
            self._check(sample, fetched)
        if await client.release([held.digest]) != 1:
            raise Wrong("a lease was not there to be released")
        return "ok"

    async def unknown(self, client: opticnerve.AsyncClient) -> str:
        """A digest of nothing."""
        digest = opticnerve.Digest(self.random.randbytes(32))
        [answer] = [one async for one in client.encode([digest], return_errors=True)]
        if not isinstance(answer, errors.NotCachedError):
            raise Wrong(f"an unknown digest is answered {answer}")
        return "ok"

    async def planned(self, client: opticnerve.AsyncClient) -> str:
        """Sizes alone."""
        drawn = self._draw()
        plans = await client.plan([sample.size for sample in drawn])
        if [plan.tokens for plan in plans] != [len(sample.rows) for sample in drawn]:
            raise Wrong(f"plans of {[sample.size for sample in drawn]} do not say how many rows there are")
        return "ok"

    def _garbage(self) -> bytes:
        file = self.random.choice([sample.source for sample in self.samples if isinstance(sample.source, bytes)])
        return self.random.choice((file[: len(file) // 2], self.random.randbytes(500), b""))


KINDS = {
    "good": 40,
    "broken": 10,
    "cancelled": 12,
    "hurried": 6,
    "slow": 6,
    "oversized": 3,
    "held": 8,
    "unknown": 4,
    "planned": 8,
}
"""The kinds of calls, by how often they are drawn; each is a method of Soak."""


def bomb() -> bytes:
    """A valid header of a PNG of 40000 x 40000 pixels."""
    file = io.BytesIO()
    Image.new("L", (8, 8)).save(file, "PNG")
    data = bytearray(file.getvalue())
    data[16:24] = (40_000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


# --- the reference


def make_samples(config: Config, seed: int) -> tuple[list[Sample], float]:
    """Images of random sizes with their rows, and the tolerance of the tower's dtype."""
    from .bench.inprocess import InProcessEngine
    from .loading import load

    loaded = load(dataclasses.replace(config, graphs=False))
    tower, draw = loaded.tower.tower, np.random.default_rng(seed)
    samples = []
    with InProcessEngine(tower, loaded.graphs, loaded.capacities, use_graphs=False, slot_bytes=256 << 20) as engine:
        for number in range(STILLS):
            height, width = draw.integers(SMALLEST, LARGEST, 2)
            pixels = draw.integers(0, 256, (height, width, 3), np.uint8)
            source = encoded(pixels, number)
            seen = decode(source, max_pixels=1 << 30, background=config.alpha_background) if number % 3 else pixels
            plan = tower.planner.plan(ImageItem(*seen.shape[:2]))
            room = np.empty(plan.pixel_bytes, np.uint8)
            tower.planner.fill_pixels(seen, plan, room)
            items = engine.place([plan], [room], "float32")
            engine.run(items)
            rows = engine.rows(items[0]).numpy()
            engine.free(items)
            samples.append(Sample(source if number % 3 else pixels, seen.shape[:2], rows))
    return samples, TOLERANCE[str(tower.dtype).removeprefix("torch.")]


def encoded(pixels: npt.NDArray[np.uint8], number: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, ("PNG", "JPEG", "WEBP")[number % 3])
    return file.getvalue()


def soak(config: Config, *, calls: int, seconds: float, concurrency: int, seed: int) -> dict[str, Any]:
    """Run it; the verdict: what was called, what was wrong, and what has leaked."""
    samples, tolerance = make_samples(config, seed)
    memory: list[int] = []
    with LocalServer(config) as server:
        run = Soak(server.address, samples, tolerance, random.Random(seed))  # noqa: S311
        # What is loaded lazily, and connections that stay, are no leaks.
        asyncio.run(run.run(calls=min(200, calls), seconds=60, concurrency=concurrency, report=lambda _: None))
        files, started = settled(server), time.monotonic()

        def report(number: int) -> None:
            share = max(number / calls, (time.monotonic() - started) / seconds)
            if len(memory) <= share * 100:
                memory.append(server.memory())
                line = f"{number} calls, {len(run.wrong)} wrong, {memory[-1] >> 20} MiB, {share:.0%}"
                print(f"\r{line:<60}", end="", file=sys.stderr, flush=True)

        asyncio.run(run.run(calls=calls, seconds=seconds, concurrency=concurrency, report=report))
        print(file=sys.stderr)
        elapsed = time.monotonic() - started
        leaked = settled(server) - files
        names = ("queue_items", "queue_tokens", "queue_bytes", "store_leased_bytes")
        inside = {name: server.total(f"opticnerve_{name}") for name in names}
    half = len(memory) // 2
    quarters = memory[half : half + half // 2] or memory, memory[half + half // 2 :] or memory
    grown = int(statistics.median(quarters[1]) - statistics.median(quarters[0]))
    faults = [f"{len(run.wrong)} wrong answers"] if run.wrong else []
    faults += [f"{name} is {value:g} at the end" for name, value in inside.items() if value]
    faults += [f"{leaked} file descriptors leaked"] if leaked > 0 else []
    faults += [f"memory grew by {grown} bytes"] if grown > BYTES_GROWN else []
    faults += [f"the server ended with {server.exit_code}"] if server.exit_code else []
    return {
        "seed": seed,
        "seconds": round(elapsed, 1),
        "calls": sum(run.calls.values()),
        "outcomes": dict(sorted(run.calls.items())),
        "memory_mib": [value >> 20 for value in memory[:: max(1, len(memory) // 10)]],
        "memory_grown_bytes": grown,
        "files_leaked": leaked,
        "wrong": run.wrong[:10],
        "faults": faults,
        "passed": not faults,
    }


def settled(server: LocalServer, seconds: float = 30.0) -> int:
    """Open files once everything is out, leases have run out included, or after `seconds`."""
    gc.collect()  # calls that failed lie in cycles with their errors, and hold connections of clients that are closed
    until, before = time.monotonic() + seconds, -1
    while time.monotonic() < until:
        busy = server.total("opticnerve_queue_items") or server.total("opticnerve_store_leased_bytes")
        files = server.files()
        if not busy and files == before:
            break
        before = files
        time.sleep(1)
    return server.files()
