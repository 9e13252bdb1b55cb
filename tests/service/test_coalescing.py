"""Many small calls while the device is busy: few dispatches, the same rows bit for bit, and nothing for nobody.

The server has one budget, so that a call alone and a call among others run in the same shapes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import numpy as np
import numpy.typing as npt
import pytest

import opticnerve
from opticnerve.errors import DeadlineExceededError, ImageInvalidError
from opticnerve_server.models.checkpoint import write_checkpoint
from running_server import HEAVY, SLOWLY, RunningServer, eventually, running

BUDGET = 1024
CALLS = 64
IMAGES = 16  # different ones among the calls: each runs alone too, which takes its time
SIZES = [(256, 256), (224, 320), (288, 256), (352, 256), (320, 320)]  # 64 to 100 tokens
SETTLED_S = 0.4
"""Time for a small call to be admitted, decoded and queued."""

Pixels = npt.NDArray[np.uint8]


def noise(height: int, width: int, seed: int) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("coalescing")
    write_checkpoint("qwen3_vl", directory / "model")
    with running(directory / "model", directory, "--token-budgets", str(BUDGET), **SLOWLY) as server:
        yield server


async def encode(client: opticnerve.AsyncClient, image: Pixels | bytes, **options: float) -> opticnerve.Embedding:
    [embedding] = [answer async for answer in client.encode([image], dtype="float32", **options)]
    return embedding


def dispatched(server: RunningServer) -> tuple[float, float]:
    """Dispatches and items of them so far."""
    return server.total("opticnerve_dispatches_total"), server.total("opticnerve_dispatched_items_total")


def settled(server: RunningServer, items: float) -> tuple[float, float]:
    """Dispatches and items, once so many items are counted: answers may come before they are."""
    eventually(lambda: dispatched(server)[1] >= items)
    return dispatched(server)


@asynccontextmanager
async def busy(server: RunningServer, client: opticnerve.AsyncClient) -> AsyncIterator[None]:
    """The device is at work on one large image within the block, and has done it when the block has ended."""
    before, idle = dispatched(server), server.engine_seconds()
    heavy = asyncio.create_task(encode(client, noise(*HEAVY, seed=0)))
    await asyncio.to_thread(server.wait_until_busy, idle)
    yield
    assert (await heavy).outcome == "eager"
    await asyncio.to_thread(eventually, lambda: dispatched(server)[1] > before[1])


async def test_waiting_calls_share_dispatches_and_get_the_rows_they_get_alone(server: RunningServer) -> None:
    images = [noise(*SIZES[i % len(SIZES)], seed=i) for i in range(IMAGES)]
    _, before = dispatched(server)
    async with opticnerve.AsyncClient(server.address, timeout=240) as client:
        alone = [await encode(client, image) for image in images]
        dispatches, items = await asyncio.to_thread(settled, server, before + IMAGES)
        async with busy(server, client):
            corrupt = asyncio.create_task(encode(client, b"\xff\xd8\xff no photograph"))
            together = await asyncio.gather(*(encode(client, images[i % IMAGES]) for i in range(CALLS)))
            with pytest.raises(ImageInvalidError):
                await corrupt
        shared_dispatches = (await asyncio.to_thread(settled, server, items + 1 + CALLS))[0] - dispatches - 1
    assert shared_dispatches <= CALLS / 4
    for i, shared in enumerate(together):
        solo = alone[i % IMAGES]
        assert (solo.dispatches[0].budget, shared.dispatches[0].budget) == (BUDGET, BUDGET)
        assert solo.dispatches[0].batch_items == 1
        assert shared.array.tobytes() == solo.array.tobytes()
    assert max(embedding.dispatches[0].batch_items for embedding in together) > CALLS / 8


async def test_what_nobody_waits_for_never_reaches_the_device(server: RunningServer) -> None:
    image = noise(256, 256, seed=1)
    async with opticnerve.AsyncClient(server.address, timeout=240) as client:
        dispatches, items = dispatched(server)
        async with busy(server, client):
            cancelled = asyncio.create_task(encode(client, image))
            expired = asyncio.create_task(encode(client, image, timeout=2 * SETTLED_S))
            await asyncio.sleep(SETTLED_S)
            cancelled.cancel()
            with pytest.raises(DeadlineExceededError):
                await expired
            assert dispatched(server)[1] == items, "the device was free too early for this test"
        assert dispatched(server) == (dispatches + 1, items + 1)
        await asyncio.to_thread(eventually, lambda: server.total("opticnerve_queue_items") == 0)
        await encode(client, image)
        assert await asyncio.to_thread(settled, server, items + 2) == (dispatches + 2, items + 2)
    # A client that gives up at its deadline says so, which may arrive before the server's own clock says it.
    ended = [server.total("opticnerve_items_total", result=result) for result in ("cancelled", "expired")]
    assert ended in ([1, 1], [2, 0])
