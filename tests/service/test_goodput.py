"""A device of fixed speed: three times as many calls as it takes, and calls that cannot be done in time.

The device sleeps for a fixed time a batch, so that neither decoders nor callers take anything from its speed. The
environment variable OVERLOAD_S sets the seconds of overload: 120 for the long form.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import opticnerve
from opticnerve.errors import ExpiredInQueueError
from opticnerve_server.models.checkpoint import write_checkpoint
from running_server import TAMPERED, WAIT_S, RunningServer, eventually, running

LOAD = Path(__file__).parents[1] / "load.py"
OVERLOAD_S = float(os.environ.get("OVERLOAD_S", "5"))
BATCH_S, BATCH_ITEMS, QUEUE_ITEMS = 0.2, 8, 32
CAPACITY = BATCH_ITEMS / BATCH_S
"""Items a second."""
LATENCY_S = QUEUE_ITEMS / CAPACITY + BATCH_S
"""Of an item that joins a full queue behind a batch that has just begun."""

LATE_S = 0.02
"""Where other work keeps processes that only sleep and send from waking up in time, times say nothing of the server."""


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fault") / "fault"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, fault: Path) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("server")
    write_checkpoint("qwen3_vl", directory / "model")
    flags = ("--token-budgets", 512, "--max-items-per-batch", BATCH_ITEMS, "--max-queue-items", QUEUE_ITEMS)
    how = {"TAMPER": str(fault), "OMP_NUM_THREADS": "1"}  # the device needs no processor, let alone two
    with running(directory / "model", directory, *map(str, flags), program=TAMPERED, **how) as server:
        yield server


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 tokens."""
    path = tmp_path_factory.mktemp("image") / "image.png"
    Image.linear_gradient("L").save(path)
    return path


def spawn(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(LOAD), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it printed. Its standard input ends now."""
    printed, _ = process.communicate(timeout=OVERLOAD_S + WAIT_S)
    assert process.returncode == 0
    result: dict[str, Any] = json.loads(printed)
    return result


def p99(calls: list[list[float]]) -> float:
    """Of the time that calls took."""
    return sorted(seconds for _, seconds in calls)[len(calls) * 99 // 100]


def test_goodput_stays_at_capacity(server: RunningServer, fault: Path, image: Path) -> None:
    fault.write_text(json.dumps({"seconds": BATCH_S}))
    probe = spawn("probe", server.health_address)
    load = result_of(spawn("open", server.address, image, round(3 * CAPACITY), OVERLOAD_S))
    late = max(result_of(probe)["late_s"], load["late_s"])
    ended = load["ended"]
    done, refused = ended["OK"], ended["RESOURCE_EXHAUSTED"]
    assert ended.keys() == {"OK", "RESOURCE_EXHAUSTED"}, "every call is answered with rows, or with a refusal"
    assert len(done) + len(refused) == 3 * CAPACITY * OVERLOAD_S
    amid = [at for at, _ in done if at < OVERLOAD_S]
    goodput = (len(amid) - 1) / (amid[-1] - amid[0])
    seen = {"goodput": goodput, "refused_p99_s": p99(refused), "done_p99_s": p99(done), "late_s": late}
    print(seen)
    if late < LATE_S:
        assert goodput > 0.9 * CAPACITY, seen
        assert p99(refused) < 0.05, seen
        assert p99(done) < 1.2 * LATENCY_S, seen
    for gauge in ("queue_items", "inflight_items"):
        eventually(lambda gauge=gauge: server.total(f"opticnerve_{gauge}") == 0)
    assert server.total("opticnerve_items_total", result="ok") == len(done)


def test_what_cannot_be_done_in_time_is_refused_early(server: RunningServer, fault: Path, image: Path) -> None:
    fault.write_text(json.dumps({"seconds": BATCH_S}))
    crowd = [image] * (QUEUE_ITEMS - 1)
    with opticnerve.Client(server.address) as client:
        assert len(list(client.encode([*crowd, image]))) == QUEUE_ITEMS
        assert len(list(client.encode([image]))) == 1
        answers = client.encode(crowd)
        next(answers)  # three batches are left
        started = time.monotonic()
        with pytest.raises(ExpiredInQueueError, match="set a later one") as caught:
            list(client.encode([image], timeout=2 * BATCH_S))
        assert time.monotonic() - started < 2 * BATCH_S
        assert caught.value.metadata["stage"] == "admit"
        assert len(list(client.encode([image], timeout=WAIT_S))) == 1
        assert len(list(answers)) == len(crowd) - 1
