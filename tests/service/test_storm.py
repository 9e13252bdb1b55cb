"""Callers that leave at every moment, with items of every size: nothing is lost, nothing wrong, nothing left inside."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

import opticnerve
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve.v1 import encoder_pb2_grpc as pb_grpc
from opticnerve_server.models.checkpoint import write_checkpoint
from running_server import RunningServer, eventually, running

CALLS, CALLERS = 300, 16
SMALL, LARGE = (96, 128), (640, 512)
"""Sizes in pixels: 64 tokens, and more than the one budget of 256 holds."""


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)


def raw(pixels: np.ndarray) -> pb.Item:
    height, width, _ = pixels.shape
    return pb.Item(raw_image=pb.RawImage(height=height, width=width, data=pixels.tobytes()))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("storm")
    write_checkpoint("qwen3_vl", directory / "model")
    with running(directory / "model", directory, "--token-budgets", "256") as server:
        yield server


def leave_early(stub: pb_grpc.EncoderServiceStub, seed: int) -> None:
    """One call that reads a little, or nothing, and is cancelled or dies of its deadline."""
    chance = random.Random(seed)
    items = [raw(noise(*SMALL))] * chance.randint(1, 5) + [raw(noise(*LARGE))] * chance.randint(0, 1)
    timeout = chance.choice([0.05, 0.2, 30.0])
    call = stub.Encode(pb.EncodeRequest(items=items), timeout=timeout)
    time.sleep(chance.random() * 0.2)
    try:
        for _ in range(chance.randint(0, 3)):
            next(call)
    except (grpc.RpcError, StopIteration):
        pass
    call.cancel()


def test_a_storm_of_leaving_callers(server: RunningServer) -> None:
    with opticnerve.Client(server.address) as client:
        before = [embedding.array.tobytes() for embedding in client.encode([noise(*SMALL), noise(*LARGE)])]
        with grpc.insecure_channel(server.address) as channel, ThreadPoolExecutor(CALLERS) as callers:
            stub = pb_grpc.EncoderServiceStub(channel)
            list(callers.map(lambda seed: leave_early(stub, seed), range(CALLS)))
        assert server.process.poll() is None
        eventually(lambda: client.info().occupancy.items == 0)
        assert client.info().occupancy.bytes == 0
        assert server.total("opticnerve_inflight_items") == 0
        after = [embedding.array.tobytes() for embedding in client.encode([noise(*SMALL), noise(*LARGE)])]
    assert after == before
    assert not server.events("thread died")
    assert not server.events("batch failed")
    assert not server.events("front-end died, its calls are lost")
