"""The engine's sign of life follows the device, not the thread that sends it; what its fingerprint is of."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from opticnerve_server import messages
from opticnerve_server.config import Config
from opticnerve_server.engine import STUCK_S, Engine
from opticnerve_server.loading import load
from opticnerve_server.messages import Occupancy
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.runner import IDLE, Runner
from opticnerve_server.slots import Arena


@pytest.fixture
def pair() -> Iterator[tuple[Engine, socket.socket]]:
    """An engine before it has loaded anything, and the supervisor's end of its control socket."""
    ours, theirs = messages.socket_pair()
    ours.settimeout(0.2)
    config = Config(model="none", max_queue_bytes=1 << 20, max_request_bytes=1 << 20, store_bytes=0)
    arena_fd = Arena.create(config.arena_bytes)
    yield Engine(config, theirs, arena_fd), ours
    os.close(arena_fd)
    ours.close()
    theirs.close()


def running(busy_since: float, works: bool = True) -> Runner:
    """What the engine asks of a runner."""
    return cast(Runner, SimpleNamespace(busy_since=busy_since, works=works))


def test_an_idle_engine_and_one_at_work_are_alive(pair: tuple[Engine, socket.socket]) -> None:
    engine, supervisor = pair
    for runner in (None, running(IDLE), running(time.monotonic() - STUCK_S / 2)):
        engine.runner = runner
        engine._report()
        assert messages.decode(supervisor.recv(1024)) == Occupancy(0, 0, 0)


def test_an_engine_whose_batch_does_not_end_is_silent(pair: tuple[Engine, socket.socket]) -> None:
    engine, supervisor = pair
    engine.runner = running(time.monotonic() - STUCK_S - 1)
    engine._report()
    with pytest.raises(TimeoutError):
        supervisor.recv(1024)


def test_the_sign_of_life_says_whether_the_device_works(pair: tuple[Engine, socket.socket]) -> None:
    engine, supervisor = pair
    engine.runner = running(IDLE, works=False)
    engine._report()
    assert messages.decode(supervisor.recv(1024)) == Occupancy(0, 0, 0, works=False)


def test_a_dead_thread_is_a_dead_process() -> None:
    code = (
        "import time\n"
        "from opticnerve_server.engine import _thread\n"
        "def dies(): raise RuntimeError('broken')\n"
        "print(time.monotonic(), flush=True)\n"
        "_thread(dies, 'finisher')\n"
        "time.sleep(60)"
    )
    died = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    seconds = time.monotonic() - float(died.stdout)
    assert died.returncode == 1
    assert died.stderr.startswith("thread died")
    assert seconds < 2.0


def test_the_fingerprint_is_of_all_that_rows_depend_on(pair: tuple[Engine, socket.socket], tmp_path: Path) -> None:
    engine, _ = pair
    for name, seed in (("one", 0), ("other weights", 1), ("other processor", 0)):
        write_checkpoint("qwen3_vl", tmp_path / name, seed)
    file = tmp_path / "other processor" / "preprocessor_config.json"
    processor = json.loads(file.read_text())
    file.write_text(json.dumps(processor | {"size": processor["size"] | {"shortest_edge": 128 * 128}}))

    def fingerprint(model: str, **settings: object) -> str:
        engine.config = Config(model=str(tmp_path / model), device="cpu", **settings)  # type: ignore[arg-type]
        return engine._ready(load(engine.config)).fingerprint

    one = fingerprint("one")
    others = [fingerprint("other weights"), fingerprint("other processor")]
    others += [fingerprint("one", alpha_background="#000000"), fingerprint("one", dtype="bfloat16")]
    assert len({one, *others}) == 5
    assert fingerprint("one", max_image_pixels=1000, token_budgets="64") == one, "these change no row"
