"""Children that die or fall silent, and who replaces them, by the supervisor with real processes and fake ones."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from opticnerve.v1 import encoder_pb2 as pb
from supervised import NAMES, Server, assert_nothing_left, engines_of, eventually, has_ended, starting


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    with starting(tmp_path) as start_server:
        yield start_server


def test_a_silent_scheduler_is_not_alive_until_it_speaks_again(start: Callable[..., Server], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    server = start(environment={"FAKE_SCHEDULER": "mute", "FAKE_GATE": str(gate), "FAKE_SILENCE_S": "0.5"})
    server.ready()
    assert server.health()["liveness"]
    gate.touch()
    eventually(lambda: not server.health()["liveness"])
    assert server.health()["readiness"]
    gate.unlink()
    eventually(lambda: server.health()["liveness"])
    assert server.event("scheduler is silent")["level"] == "error"


def test_a_silent_engine_is_killed(start: Callable[..., Server], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    server = start(environment={"FAKE_ENGINE": "mute", "FAKE_GATE": str(gate), "FAKE_SILENCE_S": "0.5"})
    server.ready()
    gate.touch()
    assert server.exit_code() == 3
    assert server.event("child is silent")["child"] == "engine-0"
    assert_nothing_left(server)


@pytest.mark.parametrize("how", ["stopped", "stuck"])
def test_a_silent_front_end_is_replaced(start: Callable[..., Server], tmp_path: Path, how: str) -> None:
    gate = tmp_path / "gate"
    silence = {"FAKE_FRONTEND": "stuck", "FAKE_GATE": str(gate), "FAKE_FRONTEND_SILENCE_S": "2"}
    server = start(environment=silence)
    server.ready()
    before = server.children()
    if how == "stuck":
        gate.touch()
    else:
        os.kill(before["0"], signal.SIGSTOP)
    silent = server.event("child is silent")
    assert silent["child"] == "frontend-0"
    assert 2 <= silent["seconds"] < 10
    eventually(lambda: "2" in server.children())
    assert has_ended(before["0"])
    assert not has_ended(before["1"])
    assert server.health() == dict.fromkeys(NAMES, True)


def test_a_supervisor_that_was_stopped_itself_blames_nobody(start: Callable[..., Server]) -> None:
    server = start(environment={"FAKE_FRONTEND_SILENCE_S": "2"})
    server.ready()
    family = [server.process.pid, *server.children().values()]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    for pid in family:
        os.kill(pid, signal.SIGCONT)
    time.sleep(1.5)
    assert sorted(server.children()) == ["0", "1"]
    server.process.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0


def test_a_killed_engine_is_exit_3_after_front_ends_were_told(start: Callable[..., Server]) -> None:
    server = start(environment={"FAKE_WORK_S": "0.3"})
    server.ready()
    os.kill(engines_of(server)[0], signal.SIGKILL)
    assert server.exit_code() == 3
    assert server.event("engine died")["exit_code"] == -signal.SIGKILL
    assert server.told.read_text().count("Phase.FAILED") == 2
    assert_nothing_left(server)


def phases(server: Server) -> list[tuple[int, int]]:
    """Phase and restarts of each device."""
    return [(device.phase, device.restarts) for device in server.info().devices]


def test_a_killed_engine_is_replaced_while_others_serve(start: Callable[..., Server], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    server = start(
        devices="0,1", environment={"FAKE_ENGINE": "late", "FAKE_GATE": str(gate)}, min_engines=1, frontends=1
    )
    server.ready()
    eventually(lambda: phases(server) == [(pb.PHASE_READY, 0), (pb.PHASE_CAPTURING, 0)])
    gate.touch()
    eventually(lambda: phases(server) == [(pb.PHASE_READY, 0), (pb.PHASE_READY, 0)])
    assert [device.name for device in server.info().devices] == ["cpu", "cpu"]
    eventually(lambda: server.info().occupancy.tokens == 2)  # the scheduler has both
    first, second = engines_of(server)
    gate.unlink()
    os.kill(second, signal.SIGKILL)
    assert server.event("engine died")["device"] == 1
    eventually(lambda: server.info().occupancy.tokens == 1)
    assert server.health()["readiness"]
    eventually(lambda: phases(server) == [(pb.PHASE_READY, 0), (pb.PHASE_CAPTURING, 1)])
    scraped = server.metrics()
    assert 'opticnerve_device_up{device="0"} 1.0' in scraped
    assert 'opticnerve_device_up{device="1"} 0.0' in scraped
    gate.touch()
    eventually(lambda: phases(server) == [(pb.PHASE_READY, 0), (pb.PHASE_READY, 1)])
    assert 'opticnerve_device_restarts{device="1"} 1.0' in server.metrics()
    assert server.told.read_text().count("Phase.READY: 'ready'>, restarts=1") == 1, "front-ends hear of it"
    gate.unlink()
    os.kill(engines_of(server)[1], signal.SIGKILL)
    eventually(lambda: server.info().occupancy.tokens == 1)
    os.kill(first, signal.SIGKILL)  # while the other starts: none is left
    assert server.exit_code() == 3
    assert_nothing_left(server)


@pytest.mark.parametrize("engine", ["broken", "other"])
def test_an_engine_that_does_not_come_back_is_left_out(
    start: Callable[..., Server], tmp_path: Path, engine: str
) -> None:
    """It ends while it starts, or comes back with another model."""
    gate = tmp_path / "gate"
    server = start(devices="0,1", environment={"FAKE_ENGINE": engine, "FAKE_GATE": str(gate)}, frontends=1)
    server.ready()
    gate.touch()
    os.kill(engines_of(server)[1], signal.SIGKILL)
    eventually(lambda: phases(server) == [(pb.PHASE_READY, 0), (pb.PHASE_FAILED, 1)])
    assert server.health() == dict.fromkeys(NAMES, True)
    server.process.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0
    assert_nothing_left(server)


def test_an_engine_that_keeps_dying_is_left_out(start: Callable[..., Server]) -> None:
    server = start(devices="0,1", frontends=1)
    server.ready()
    before = len(os.listdir(f"/proc/{server.process.pid}/fd"))
    for restarts in range(5):
        eventually(lambda restarts=restarts: phases(server)[1] == (pb.PHASE_READY, restarts))
        os.kill(engines_of(server)[1], signal.SIGKILL)
    eventually(lambda: phases(server) == [(pb.PHASE_READY, 0), (pb.PHASE_FAILED, 4)])
    assert server.event("device is left out")["device"] == 1
    assert server.health() == dict.fromkeys(NAMES, True)
    assert 'opticnerve_device_up{device="1"} 0.0' in server.metrics()
    eventually(lambda: len(os.listdir(f"/proc/{server.process.pid}/fd")) < before)
    server.process.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0
    assert_nothing_left(server)


def test_a_killed_front_end_is_replaced(start: Callable[..., Server]) -> None:
    server = start()
    server.ready()
    before = server.children()
    os.kill(before["0"], signal.SIGKILL)
    eventually(lambda: "2" in server.children())
    after = server.children()
    assert after["1"] == before["1"]

    def told_to_heir() -> list[str]:
        return [line for line in server.told.read_text().splitlines() if line.startswith("2 ")]

    eventually(lambda: len(told_to_heir()) >= 4)
    heir = told_to_heir()
    assert "hello from the scheduler" in heir[0]  # it has a socket of its own to the scheduler
    assert "Phase.READY" in heir[1]
    assert "Devices" in heir[2]
    assert "EngineReady" in heir[3]
    assert server.health()["readiness"]
    server.process.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0
    assert_nothing_left(server)


def test_an_heir_begins_with_the_last_good_tokens(start: Callable[..., Server], tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("old:old-token-0123456789\n")
    server = start(frontends=1, auth_token_file=str(file))
    server.ready()
    file.write_text("new:new-token-0123456789\n")
    server.event("changed files are used from now on")
    file.write_text("broken")
    os.kill(server.children()["0"], signal.SIGKILL)
    eventually(lambda: server.has("1"))
    [heir, *_] = [line for line in server.told.read_text().splitlines() if line.startswith("1 ")]
    assert "['new']" in heir
    assert server.health()["readiness"]


def test_front_ends_that_keep_dying_end_the_server(start: Callable[..., Server]) -> None:
    server = start(frontends=1)
    server.ready()
    for index in range(5):
        name = str(index)
        eventually(partial(server.has, name))
        os.kill(server.children()[name], signal.SIGKILL)
    assert server.exit_code() == 1
    assert "5 front-ends died within 60 s" in server.event("failed")["reason"]
    assert_nothing_left(server)


def test_children_die_with_a_killed_supervisor(start: Callable[..., Server]) -> None:
    server = start()
    server.ready()
    children = [*engines_of(server), *server.children().values()]
    server.process.kill()
    server.process.wait()
    for pid in children:
        eventually(partial(has_ended, pid))
