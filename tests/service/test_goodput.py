"""Three times as many calls as a device can take: it stays as fast, and who is refused learns it at once.

The device sleeps for a fixed time a batch, so that neither decoders nor callers take anything from its speed. The
environment variable OVERLOAD_S sets the seconds of overload: 120 for the long form.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from opticnerve_server.models.checkpoint import write_checkpoint
from running_server import TAMPERED, WAIT_S, RunningServer, eventually, running

LOAD = Path(__file__).parents[1] / "load.py"
OVERLOAD_S = float(os.environ.get("OVERLOAD_S", "8"))
BATCH_S, BATCH_ITEMS, QUEUE_ITEMS = 0.2, 8, 32
CAPACITY = BATCH_ITEMS / BATCH_S
"""Items a second."""
LATENCY_S = QUEUE_ITEMS / CAPACITY + BATCH_S
"""Of an item that joins a full queue behind a batch that has just begun."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    write_checkpoint("qwen3_vl", tmp_path / "model")
    fault = tmp_path / "fault"
    flags = (
        "--token-budgets",
        512,
        "--max-items-per-batch",
        BATCH_ITEMS,
        "--max-queue-items",
        QUEUE_ITEMS,
        "--store-bytes",
        0,
    )
    how = {"TAMPER": str(fault), "OMP_NUM_THREADS": "1"}  # the device needs no processor, let alone two
    with running(tmp_path / "model", tmp_path, *map(str, flags), program=TAMPERED, **how) as server:
        fault.write_text(json.dumps({"seconds": BATCH_S}))
        yield server


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """64 tokens."""
    file = io.BytesIO()
    Image.linear_gradient("L").save(file, "PNG")
    (tmp_path / "image.png").write_bytes(file.getvalue())
    return tmp_path / "image.png"


def load(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, str(LOAD), *map(str, arguments)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=OVERLOAD_S + WAIT_S).stdout
    result: dict[str, Any] = json.loads(printed)
    return result


def test_goodput_stays_at_capacity(server: RunningServer, image: Path) -> None:
    seen = load("open", server.address, image, round(3 * CAPACITY), OVERLOAD_S)
    print(json.dumps(seen, indent=1))
    late_s, done, refused = seen.pop("late_s"), seen.pop("OK"), seen.pop("RESOURCE_EXHAUSTED")
    assert seen == {}, "every call is answered with rows, or with a refusal"
    assert done["count"] + refused["count"] == 3 * CAPACITY * OVERLOAD_S
    assert done["per_s"] > 0.9 * CAPACITY
    assert refused["p95_s"] < 0.05  # the rest is left to a machine that does other work too
    assert done["p99_s"] < 1.2 * LATENCY_S + late_s
    for gauge in ("queue_items", "inflight_items"):
        eventually(lambda gauge=gauge: server.total(f"opticnerve_{gauge}") == 0)
    assert server.total("opticnerve_items_total", result="ok") == done["count"]
