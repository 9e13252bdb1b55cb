"""A device without memory, or that does not compute, under a whole server: what callers and probes see of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt
import pytest

import opticnerve
from opticnerve.errors import GpuFaultError, GpuMemoryError
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve.v1 import encoder_pb2_grpc as pb_grpc
from opticnerve_server.models.checkpoint import write_checkpoint
from running_server import TAMPERED, RunningServer, eventually, running

PROBE_S = 2.0
"""Well below any sensible probe period."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("faults") / "model"
    write_checkpoint("qwen3_vl", directory)
    return directory


@pytest.fixture
def fault(tmp_path: Path) -> Path:
    """While this file exists, the device does what it says; see tampered_server.py."""
    return tmp_path / "fault"


@pytest.fixture
def server(model: Path, tmp_path: Path, fault: Path) -> Iterator[RunningServer]:
    flags = ("--token-budgets", "64,256", "--store-bytes", "0")  # rows that are stored would need no device
    with running(model, tmp_path, *flags, program=TAMPERED, TAMPER=str(fault)) as server:
        yield server


def picture(height: int, width: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)


def assert_close(one: object, other: object) -> None:
    """Their batches may have had different shapes, hence other orders of sums."""
    assert isinstance(one, opticnerve.Embedding)
    assert isinstance(other, opticnerve.Embedding)
    rows, expected = one.array.astype(np.float32), other.array.astype(np.float32)
    assert np.linalg.norm(rows - expected) <= 2e-2 * np.linalg.norm(expected)


def within(seconds: float, condition: Callable[[], bool]) -> None:
    began = time.monotonic()
    eventually(condition)
    assert time.monotonic() - began < seconds


def test_items_that_find_no_memory_fail_alone(server: RunningServer, fault: Path) -> None:
    fine, huge = picture(256, 256), picture(480, 480)  # 64 tokens, 225
    with opticnerve.Client(server.address) as client:
        [alone] = client.encode([fine])
        fault.write_text('{"most": 64}')
        answers = list(client.encode([fine, fine, fine, huge, fine], return_errors=True))
    none = answers.pop(3)
    assert isinstance(none, GpuMemoryError)
    assert (none.code, none.retry_after) == ("RESOURCE_EXHAUSTED", 1.0)
    for answer in answers:
        assert_close(answer, alone)
    assert server.health() == {"readiness": True, "liveness": True, "startup": True}
    assert server.events("no memory for a batch")
    assert not server.events("thread died")


def test_readiness_follows_the_device_and_liveness_does_not(server: RunningServer, fault: Path) -> None:
    with opticnerve.Client(server.address) as client:
        [before] = client.encode([picture(256, 256)])
        fault.write_text('{"fail": true}')
        with grpc.insecure_channel(server.address) as channel:
            call = pb_grpc.EncoderServiceStub(channel).Encode(request(), timeout=30)
            with pytest.raises(grpc.RpcError) as refusal:
                list(call)
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        within(PROBE_S, lambda: not server.health()["readiness"])
        assert server.health() == {"readiness": False, "liveness": True, "startup": True}
        assert client.info().phase == pb.PHASE_UNHEALTHY
        assert server.total("opticnerve_phase", phase="unhealthy") == 1
        with opticnerve.Client(server.address, wait_until_ready=False) as hasty, pytest.raises(GpuFaultError):
            list(hasty.encode([picture(256, 256)]))
        fault.unlink()
        within(PROBE_S + 1, lambda: server.health()["readiness"])  # without traffic
        [after] = client.encode([picture(256, 256)])
        assert_close(after, before)
        assert client.info().occupancy.items == 0


def request() -> pb.EncodeRequest:
    pixels = picture(256, 256)
    return pb.EncodeRequest(items=[pb.Item(raw_image=pb.RawImage(height=256, width=256, data=pixels.tobytes()))])
