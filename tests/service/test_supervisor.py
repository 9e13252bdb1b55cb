"""The supervisor with real processes, sockets and signals, and fake children: see fake_server.py."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from opticnerve.v1 import encoder_pb2 as pb
from opticnerve.v1 import encoder_pb2_grpc as pb_grpc
from opticnerve_server.lifecycle import EXIT_S

PROGRAM = Path(__file__).with_name("fake_server.py")
NAMES = ("", "opticnerve.v1.EncoderService", "readiness", "startup", "liveness")
WAIT_S = 30.0


@dataclasses.dataclass
class Server:
    process: subprocess.Popen[str]
    lines: queue.Queue[dict[str, Any]]
    told: Path
    temporary: Path
    frontends: int
    addresses: dict[str, str] = dataclasses.field(default_factory=dict)
    reader: threading.Thread = dataclasses.field(default_factory=threading.Thread)

    def event(self, name: str) -> dict[str, Any]:
        """The next log line of this event."""
        until = time.monotonic() + WAIT_S
        seen = []
        while (left := until - time.monotonic()) > 0:
            try:
                line = self.lines.get(timeout=left)
            except queue.Empty:
                break
            if line["event"] == name:
                return line
            seen.append(line)
        raise AssertionError(f"no {name!r} among {seen}")

    def listening(self) -> None:
        self.addresses = self.event("listening")

    def ready(self) -> None:
        """Wait until the server is ready and each of its front-ends has spoken."""
        self.listening()
        self.event("ready")
        eventually(lambda: len(self.children()) == self.frontends)

    def children(self) -> dict[str, int]:
        """Process ids of the front-ends, as they reported them."""
        return {line.split()[0]: int(line.split()[1]) for line in self.told.read_text().splitlines()}

    def has(self, frontend: str) -> bool:
        return frontend in self.children()

    def health(self) -> dict[str, int]:
        with grpc.insecure_channel(self.addresses["health_listen"]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            return {
                name: stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status == 1 for name in NAMES
            }

    def info(self) -> pb.GetServerInfoResponse:
        with grpc.insecure_channel(self.addresses["health_listen"]) as channel:
            return pb_grpc.EncoderServiceStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=5)

    def metrics(self) -> list[str]:
        with urllib.request.urlopen(f"http://{self.addresses['metrics_listen']}/metrics", timeout=5) as answer:
            text: str = answer.read().decode()
        return text.splitlines()

    def exit_code(self) -> int:
        return self.process.wait(WAIT_S)


def engines_of(server: Server) -> list[int]:
    """The children behind the scheduler that are neither front-ends nor multiprocessing's tracker, the oldest first."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    frontends = {str(pid) for pid in server.children().values()}
    spawned = [pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    others = [int(pid) for pid in spawned if pid not in frontends]
    return sorted(others, key=lambda pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]))[1:]


def has_ended(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


def eventually(condition: Callable[[], Any]) -> Any:
    until = time.monotonic() + WAIT_S
    while not (result := condition()):
        assert time.monotonic() < until, condition
        time.sleep(0.02)
    return result


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers = []

    def start_server(*, environment: dict[str, str] | None = None, **settings: Any) -> Server:
        told, temporary = tmp_path / "told", tmp_path / "tmp"
        told.touch()
        temporary.mkdir()
        config = {
            "model": "unused",
            "listen": "127.0.0.1:0",
            "health_listen": "127.0.0.1:0",
            "metrics_listen": "127.0.0.1:0",
            "frontends": 2,
            "drain_delay": 0.0,
            "grace": 5.0,
            "max_queue_bytes": 64 << 20,
        }
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(config | settings)],
            env=os.environ | {"FAKE_LOG": str(told), "TMPDIR": str(temporary)} | (environment or {}),
            stdout=subprocess.PIPE,
            text=True,
        )
        server = Server(process, queue.Queue(), told, temporary, settings.get("frontends", 2))

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                server.lines.put(json.loads(line))

        server.reader = threading.Thread(target=read, daemon=True)
        server.reader.start()
        servers.append(server)
        return server

    yield start_server
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()
        server.reader.join()
        assert server.process.stdout is not None
        server.process.stdout.close()


def assert_nothing_left(server: Server) -> None:
    assert list(server.temporary.iterdir()) == []
    for pid in server.children().values():
        assert not Path(f"/proc/{pid}").exists()
    assert not [name for name in os.listdir("/dev/shm") if "opticnerve" in name]


def test_phases_health_info_and_metrics(start: Callable[..., Server], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    server = start(environment={"FAKE_ENGINE": "slow", "FAKE_GATE": str(gate)})
    server.listening()
    eventually(lambda: server.info().phase == pb.PHASE_CAPTURING)
    assert server.info().phase_detail == "0 of 1 graphs"
    assert server.info().model == ""
    assert server.health() == dict.fromkeys(NAMES, False) | {"liveness": True}
    assert 'opticnerve_phase{phase="capturing"} 1.0' in server.metrics()

    gate.touch()
    server.event("ready")
    assert server.health() == dict.fromkeys(NAMES, True)
    info = server.info()
    assert (info.phase, info.phase_detail, info.model, info.architecture) == (pb.PHASE_READY, "", "tiny", "fake")
    assert (info.layout.hidden, info.layout.deepstack_levels, info.fingerprint) == (8, 1, "f" * 64)
    assert list(info.paths[0].budgets) == [64]
    assert info.decode_contract["animation"] == "first frame"
    assert info.instance_id == server.addresses["instance_id"]
    eventually(lambda: server.info().occupancy.items == 2)  # both front-ends were handed to the scheduler
    scraped = server.metrics()
    assert 'opticnerve_phase{phase="ready"} 1.0' in scraped
    assert 'opticnerve_phase{phase="capturing"} 0.0' in scraped
    assert [line for line in scraped if line.startswith('opticnerve_startup_duration_seconds{phase="capturing"}')]

    server.process.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0
    assert_nothing_left(server)


def test_a_server_is_ready_when_its_front_ends_are(start: Callable[..., Server], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    server = start(environment={"FAKE_FRONTEND": "slow", "FAKE_GATE": str(gate)})
    server.listening()
    eventually(lambda: server.info().model == "tiny")  # the engine is ready
    assert not server.health()["readiness"]
    gate.touch()
    server.event("ready")
    assert server.health()["readiness"]


def test_only_health_and_info_live_on_the_health_port(start: Callable[..., Server]) -> None:
    server = start()
    server.ready()
    with grpc.insecure_channel(server.addresses["health_listen"]) as channel:
        with pytest.raises(grpc.RpcError) as refusal:
            pb_grpc.EncoderServiceStub(channel).PlanItems(pb.PlanItemsRequest(), timeout=5)
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
        request = health_pb2.HealthCheckRequest(service="nobody")
        with pytest.raises(grpc.RpcError) as refusal:
            health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
        assert refusal.value.code() is grpc.StatusCode.NOT_FOUND


def test_one_watch_sees_the_whole_life(start: Callable[..., Server], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    server = start(environment={"FAKE_ENGINE": "slow", "FAKE_GATE": str(gate)}, drain_delay=1.0)
    server.listening()
    with grpc.insecure_channel(server.addresses["health_listen"]) as channel:
        request = health_pb2.HealthCheckRequest(service="readiness")
        watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=WAIT_S)
        statuses = [next(watch).status]
        gate.touch()
        while statuses[-1] != 1:
            statuses.append(next(watch).status)
        server.process.send_signal(signal.SIGTERM)
        while statuses[-1] == 1:
            statuses.append(next(watch).status)
    assert (statuses[0], statuses[-1], 1 in statuses) == (2, 2, True)


def test_drain_leaves_the_lists_first_then_stops_front_ends_then_the_engine(start: Callable[..., Server]) -> None:
    server = start(environment={"FAKE_WORK_S": "0.5"}, drain_delay=1.0, grace=7.0)
    server.ready()
    server.process.send_signal(signal.SIGTERM)
    server.event("phase")
    assert server.health() == dict.fromkeys(NAMES, False) | {"liveness": True, "startup": True}
    assert server.info().phase == pb.PHASE_DRAINING
    assert "Stop(" not in server.told.read_text()
    socket.create_connection(tuple(server.addresses["listen"].split(":"))).close()  # type: ignore[arg-type]
    assert server.exit_code() == 0
    stopped = server.event("stopped")
    assert 1.5 <= stopped["seconds"] < 7.0
    told = server.told.read_text()
    assert told.count("Stop(grace=7.0)") == 2
    assert told.count("Phase.DRAINING") == 2
    assert_nothing_left(server)


def test_front_ends_that_do_not_finish_are_killed(start: Callable[..., Server]) -> None:
    server = start(environment={"FAKE_WORK_S": "60"}, frontends=1, grace=0.1)
    server.ready()
    server.process.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0
    assert server.event("front-end did not end in time, its calls are lost")["child"] == "frontend-0"
    assert_nothing_left(server)


def test_children_that_do_not_end_hold_a_stop_up_once_together(start: Callable[..., Server]) -> None:
    server = start(devices="0,1,2", frontends=1)
    server.ready()
    for pid in engines_of(server):
        os.kill(pid, signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0
    assert server.event("stopped")["seconds"] < 2 * EXIT_S
    assert_nothing_left(server)


def test_a_second_signal_stops_at_once(start: Callable[..., Server]) -> None:
    server = start(drain_delay=60.0)
    server.ready()
    server.process.send_signal(signal.SIGTERM)
    server.process.send_signal(signal.SIGTERM)  # as `timeout` does: still the first
    server.event("phase")
    time.sleep(0.6)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGINT)
    assert server.exit_code() == 1
    assert_nothing_left(server)


def test_a_signal_while_starting_is_a_clean_stop(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start(environment={"FAKE_ENGINE": "slow", "FAKE_GATE": str(tmp_path / "never")})
    server.listening()
    server.process.send_signal(signal.SIGINT)
    assert server.exit_code() == 0
    assert_nothing_left(server)


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


@pytest.mark.parametrize(("engine", "code"), [("exit:2", 2), ("exit:1", 1), ("exit:3", 1), ("exit:0", 1)])
def test_an_engine_that_cannot_start_ends_the_server(start: Callable[..., Server], engine: str, code: int) -> None:
    server = start(environment={"FAKE_ENGINE": engine})
    assert server.exit_code() == code
    assert f"ended with {engine.removeprefix('exit:')} while loading" in server.event("failed")["reason"]
    assert_nothing_left(server)


def test_a_start_that_takes_too_long_ends_with_the_reason(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start(environment={"FAKE_ENGINE": "slow", "FAKE_GATE": str(tmp_path / "never")}, startup_timeout=8.0)
    assert server.exit_code() == 1
    assert "startup_timeout = 8 s, still capturing 0 of 1 graphs" in server.event("failed")["reason"]
    assert_nothing_left(server)


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


def test_more_engines_than_devices_cannot_be_needed(start: Callable[..., Server]) -> None:
    server = start(devices="0,1", min_engines=3)
    assert server.exit_code() == 2
    assert "min_engines = 3 is over the number of devices, 2" in server.event("failed")["reason"]


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


@pytest.mark.parametrize("name", ["listen", "health_listen", "metrics_listen"])
def test_an_address_in_use_is_exit_2_with_the_remedy(start: Callable[..., Server], name: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        server = start(**{name: address})
        assert server.exit_code() == 2
    reason = server.event("failed")["reason"]
    assert f"cannot listen on {name} = {address}" in reason
    assert "choose another" in reason
    assert_nothing_left(server)


def test_two_servers_never_share_a_port(start: Callable[..., Server], tmp_path: Path) -> None:
    first = start()
    first.ready()
    (tmp_path / "tmp").rename(tmp_path / "first")
    second = start(listen=first.addresses["listen"])
    assert second.exit_code() == 2
