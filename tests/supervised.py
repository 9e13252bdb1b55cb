"""A supervisor with real processes, sockets and signals, and fake children: see service/fake_server.py."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from opticnerve.v1 import encoder_pb2 as pb
from opticnerve.v1 import encoder_pb2_grpc as pb_grpc

PROGRAM = Path(__file__).with_name("service") / "fake_server.py"
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


@contextmanager
def starting(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers whose logs and temporary files lie in `tmp_path`; all have ended behind it."""
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

    try:
        yield start_server
    finally:
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
