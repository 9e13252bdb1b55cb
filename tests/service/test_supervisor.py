"""The life of a server from its ports to its end, by the supervisor with real processes and fake children."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from opticnerve.v1 import encoder_pb2 as pb
from opticnerve.v1 import encoder_pb2_grpc as pb_grpc
from opticnerve_server.lifecycle import EXIT_S
from supervised import NAMES, WAIT_S, Server, assert_nothing_left, engines_of, eventually, starting


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    with starting(tmp_path) as start_server:
        yield start_server


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


def test_more_engines_than_devices_cannot_be_needed(start: Callable[..., Server]) -> None:
    server = start(devices="0,1", min_engines=3)
    assert server.exit_code() == 2
    assert "min_engines = 3 is over the number of devices, 2" in server.event("failed")["reason"]


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
