"""Eight devices, fakes: calls spread over them, and one that is killed under load costs nobody an answer."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import opticnerve
from fake_engine import rows_of
from many_devices import BATCH
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve_server.batcher import MAX_STARTED
from opticnerve_server.budgets import cut
from opticnerve_server.models import registry
from opticnerve_server.models.base import ImageItem, Planner, Sampling, VideoItem
from opticnerve_server.models.checkpoint import write_checkpoint
from running_server import RunningServer, eventually, running

DEVICES = 8
CALLERS, CALLS, IMAGES = 12, 12, 6
PROGRAM = (sys.executable, Path(__file__).parents[1] / "many_devices.py")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("devices")
    write_checkpoint("qwen3_vl", directory / "model")
    return directory


@pytest.fixture(scope="module")
def planner(directory: Path) -> Planner:
    return registry.build_planner(registry.open_model(str(directory / "model"), "safetensors"))


@pytest.fixture(scope="module")
def log(directory: Path) -> Path:
    return directory / "parts"


@pytest.fixture(scope="module")
def server(directory: Path, planner: Planner, log: Path) -> Iterator[RunningServer]:
    fakes = {"FAKE_WIDTH": str(planner.layout.width), "FAKE_SECONDS": "0.02", "FAKE_LOG": str(log)}
    devices = ",".join(map(str, range(DEVICES)))
    flags = ("--devices", devices, "--frontends", "1", "--max-queue-bytes", str(256 << 20))
    with running(directory / "model", directory, *flags, program=PROGRAM, **fakes) as server:
        yield server


def picture(seed: int, side: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)


def lines(log: Path) -> int:
    return log.read_text().count("\n")


def expected(planner: Planner, image: npt.NDArray[np.uint8]) -> npt.NDArray[np.generic]:
    """The rows that a fake device makes of an image."""
    plan = planner.plan(ImageItem(*image.shape[:2]))
    pixels = np.empty(plan.pixel_bytes, np.uint8)
    planner.fill_pixels(image, plan, pixels)
    return rows_of(pixels, plan.tokens, planner.layout.width, "bfloat16")


async def test_the_parts_of_a_video_come_in_order_from_all_devices(server: RunningServer, planner: Planner) -> None:
    frames = list(np.random.default_rng(0).integers(0, 256, (40, 256, 256, 3), np.uint8))
    plan = planner.plan(VideoItem(len(frames), 24.0, 256, 256, Sampling(fps=24.0)))
    pixels, parts = np.empty(plan.pixel_bytes, np.uint8), cut(plan, planner, {"default": [BATCH]})
    planner.fill_pixels(iter(frames), plan, pixels)
    ends = np.cumsum([part.pixel_bytes for part in parts])
    rows = [
        rows_of(pixels[end - part.pixel_bytes : end], part.tokens, planner.layout.width, "bfloat16")
        for part, end in zip(parts, ends, strict=True)
    ]
    async with opticnerve.AsyncClient(server.address) as client:
        for _ in range(3):
            [embedding] = [each async for each in client.encode([opticnerve.Frames(frames, 24.0, sample_fps=24.0)])]
            assert len({dispatch.device for dispatch in embedding.dispatches}) == len(parts) == 5
            assert embedding.array.tobytes() == np.concatenate(rows).tobytes()


async def test_one_of_eight_is_killed_under_load(server: RunningServer, planner: Planner, log: Path) -> None:
    images = [picture(seed, 64 * (1 + seed % 4)) for seed in range(24)]
    rows = [expected(planner, image).tobytes() for image in images]
    devices: Counter[int] = Counter()
    victim = server.children()[1 + 3]

    async def call(client: opticnerve.AsyncClient, first: int) -> None:
        """In the order of its items, whatever devices they were on."""
        wanted = [(first + offset) % len(images) for offset in range(IMAGES)]
        embeddings = [embedding async for embedding in client.encode([images[index] for index in wanted])]
        assert [embedding.array.tobytes() for embedding in embeddings] == [rows[index] for index in wanted]
        devices.update(dispatch.device for embedding in embeddings for dispatch in embedding.dispatches)

    async def caller(number: int) -> None:
        async with opticnerve.AsyncClient(server.address) as client:
            for turn in range(CALLS):
                await call(client, 5 * number + turn)

    async with opticnerve.AsyncClient(server.address) as client:
        large = [embedding async for embedding in client.encode([picture(seed, 512) for seed in range(8)])]
    assert len({dispatch.device for embedding in large for dispatch in embedding.dispatches}) > 3, "one call spreads"
    before = lines(log)

    callers = [asyncio.create_task(caller(number)) for number in range(CALLERS)]
    await asyncio.to_thread(eventually, lambda: lines(log) - before > CALLERS * CALLS * IMAGES / 4)
    os.kill(victim, signal.SIGKILL)
    await asyncio.gather(*callers)

    assert devices.keys() == set(range(DEVICES))
    assert devices.total() == CALLERS * CALLS * IMAGES, "none was lost, and none answered twice"
    gone = server.wait_for("engine is gone")
    assert (gone["device"], gone["failed"]) == (3, 0)
    assert gone["retried"] <= (1 + MAX_STARTED) * BATCH.items, "its open batch and those that it had taken"
    answered = lines(log) - before
    assert CALLERS * CALLS * IMAGES <= answered <= CALLERS * CALLS * IMAGES + BATCH.items
    async with opticnerve.AsyncClient(server.address) as client:
        info = await client.info()
        while {device.phase for device in info.devices} != {pb.PHASE_READY}:
            await asyncio.sleep(0.05)
            info = await client.info()
        assert [device.restarts for device in info.devices] == [0, 0, 0, 1, 0, 0, 0, 0]
        devices.clear()
        await asyncio.gather(*(call(client, first) for first in range(16)))
    assert devices[3], "it is back at work"
    assert server.total("opticnerve_device_up") == DEVICES
    assert server.total("opticnerve_device_busy_seconds_total") > 1
    assert server.total("opticnerve_device_imbalance") >= 1
    eventually(lambda: server.total("opticnerve_queue_items") == 0)
    eventually(lambda: server.total("opticnerve_inflight_items") == 0)
