"""Far more calls at once than the device can take: every one ends, probes are answered in time, and a stop is clean."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image

from opticnerve.v1 import encoder_pb2 as pb
from opticnerve.v1 import encoder_pb2_grpc as pb_grpc
from opticnerve_server.models.presets import PROCESSORS
from running_server import WAIT_S, RunningServer, eventually, running

LOAD = Path(__file__).parents[1] / "load.py"
CALLS, CALLS_AT_STOP, DEADLINE_S = 200, 100, 60
HEIGHT, WIDTH = 1080, 1920
TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 1,
    "out_hidden_size": 256,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
LIMITS = {"shortest_edge": 256 * 256, "longest_edge": 1024 * 1024}
BUDGET = 1024
"""One photograph has 1008 tokens within the limits of the processor: a tenth of a second for a core, so that two cores
do all calls well before their deadline."""


@pytest.fixture(scope="module")
def photograph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JPEG of about 500 KB with what a photograph has: structure of every scale, and noise."""
    random, pixels = np.random.default_rng(0), np.full((HEIGHT, WIDTH, 3), 128.0, np.float32)
    for octave in range(2, 9):
        coarse = random.normal(size=(3, 2**octave, 2 ** (octave + 1))).astype(np.float32)
        planes = [
            np.asarray(Image.fromarray(plane).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)) for plane in coarse
        ]
        pixels += np.stack(planes, axis=2) * 180 * 2.0 ** (-0.9 * octave)
    pixels += random.normal(size=pixels.shape) * 12
    image, file = Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), io.BytesIO()
    image.save(file, "JPEG", quality=82)
    assert 400_000 < len(file.getvalue()) < 600_000
    path = tmp_path_factory.mktemp("photograph") / "photograph.jpg"
    path.write_bytes(file.getvalue())
    return path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "vision_config": TOWER}))
    (model / "preprocessor_config.json").write_text(json.dumps(PROCESSORS["qwen3_vl"] | {"size": LIMITS}))
    flags = ("--load-format", "dummy", "--token-budgets", str(BUDGET), "--grace", "60")
    with running(model, tmp_path, *flags) as server:
        yield server


def spawn(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(LOAD), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it printed. Its standard input ends now."""
    printed, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    result: dict[str, Any] = json.loads(printed)
    return result


def test_every_call_ends_and_probes_are_answered_throughout(server: RunningServer, photograph: Path) -> None:
    probe = spawn("probe", server.health_address)
    load = result_of(spawn("calls", server.address, photograph, CALLS, DEADLINE_S))
    probed = result_of(probe)
    print(load, probed)
    codes = load["codes"]
    assert sum(codes.values()) == CALLS
    assert set(codes) <= {"OK", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
    assert codes["OK"] >= 180
    assert probed["always_serving"]
    assert probed["checks"] > 10 * load["seconds"]
    # Other work makes a check late by itself: as it does a process that only sleeps, a few times over.
    assert probed["p99_s"] < 0.1, probed
    assert probed["slowest_s"] < 0.1 + 5 * probed["late_s"], probed
    eventually(lambda: server.total("opticnerve_queue_items") == 0)
    assert server.total("opticnerve_requests_total", method="Encode") == CALLS
    assert server.total("opticnerve_items_total", result="ok") == codes["OK"]


def test_a_stop_amid_load_finishes_what_is_admitted_and_refuses_the_rest(
    server: RunningServer, photograph: Path
) -> None:
    load = spawn("calls", server.address, photograph, CALLS_AT_STOP, DEADLINE_S)
    eventually(lambda: server.total("opticnerve_queue_items") >= CALLS_AT_STOP / 2)
    server.process.send_signal(signal.SIGTERM)
    with grpc.insecure_channel(server.address, options=[("grpc.enable_retries", 0)]) as channel:
        eventually(lambda: new_call(channel, items=[]) == "UNAVAILABLE")  # by then the front-end knows
        answers = []
        while server.process.poll() is None:
            answers.append(new_call(channel, items=[pb.Item(encoded_image=pb.EncodedImage(data=b"any"))]))
            time.sleep(0.1)
    assert set(answers) == {"UNAVAILABLE"}
    assert server.exit_code() == 0
    codes = result_of(load)["codes"]
    assert sum(codes.values()) == CALLS_AT_STOP
    assert set(codes) <= {"OK", "UNAVAILABLE"}
    assert codes["OK"] >= CALLS_AT_STOP / 2
    server.assert_nothing_left()


def new_call(channel: grpc.Channel, items: list[pb.Item]) -> str:
    """The status of a call that can only fail."""
    with pytest.raises(grpc.RpcError) as refusal:
        list(pb_grpc.EncoderServiceStub(channel).Encode(pb.EncodeRequest(items=items), timeout=WAIT_S))
    return str(refusal.value.code().name)
