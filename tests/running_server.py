"""A whole server as its users run it: the program, its processes, its ports, its log."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

PROGRAM = Path(sys.executable).with_name("opticnerve-server")
TAMPERED = (sys.executable, Path(__file__).with_name("tampered_server.py"))
"""The same with a device that does as a test wants."""

WAIT_S = 120.0
"""No wait of these tests takes a tenth of this on an idle machine."""


DEFAULTS = ("--device", "cpu", "--drain-delay", "0", "--store-bytes", "0")
"""Unless a test says otherwise, equal items are encoded as often as they come."""


def eventually(condition: Callable[[], Any], seconds: float = WAIT_S) -> Any:
    """The first true result of `condition`."""
    until = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < until, condition
        time.sleep(0.02)
    return result


class RunningServer:
    """Its temporary files lie in `directory`/tmp, its log in `directory`/log."""

    def __init__(
        self, model: Path, directory: Path, *flags: str, program: Sequence[str | Path] = (PROGRAM,), **environment: str
    ) -> None:
        self.temporary, self._log = directory / "tmp", directory / "log"
        self.temporary.mkdir(parents=True)
        ports = [
            word for port in ("listen", "health-listen", "metrics-listen") for word in (f"--{port}", "127.0.0.1:0")
        ]
        command = [*program, "serve", "--model", model, *DEFAULTS, *ports, *flags]
        with self._log.open("w") as log:
            variables = os.environ | {"TMPDIR": str(self.temporary)} | environment
            self.process = subprocess.Popen(command, env=variables, stdout=log)

    def wait_until_ready(self) -> None:
        self.wait_for("ready")
        listening = self.wait_for("listening")
        self.address: str = listening["listen"]
        self.health_address: str = listening["health_listen"]
        self.metrics_address: str = listening["metrics_listen"]

    def health(self) -> dict[str, bool]:
        """What the health port answers, by name: whether it is SERVING."""
        with grpc.insecure_channel(self.health_address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            return {
                name: check(health_pb2.HealthCheckRequest(service=name), timeout=5).status == 1
                for name in ("readiness", "liveness", "startup")
            }

    # --- its log

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log lines of an event so far; the last line may still be on its way."""
        lines = self._log.read_text().split("\n")[:-1]
        return [record for line in lines if (record := json.loads(line))["event"] == name]

    def wait_for(self, name: str) -> dict[str, Any]:
        """The first log line of an event."""

        def found() -> list[dict[str, Any]]:
            assert self.process.poll() is None, self._log.read_text()
            return self.events(name)

        first: dict[str, Any] = eventually(found)[0]
        return first

    # --- its metrics

    def scrape(self) -> list[Metric]:
        """Every metric there is."""
        with urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=WAIT_S) as answer:
            return list(text_string_to_metric_families(answer.read().decode()))

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples of this name with these labels, in one scrape."""
        return sum(
            sample.value
            for family in self.scrape()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    # --- its processes

    def children(self) -> list[int]:
        """Process ids of the scheduler, which is spawned first, of the engines and of the front-ends, by their age."""
        supervisor = self.process.pid
        pids = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        spawned = [int(pid) for pid in pids if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
        return sorted(spawned, key=_birth)

    @property
    def engine(self) -> int:
        """Of a server of one device."""
        return self.children()[1]

    @property
    def frontends(self) -> list[int]:
        """Of a server of one device."""
        return self.children()[2:]

    def engine_seconds(self) -> float:
        """Processor time of the engine so far. Nothing but a forward takes a tenth of a second of it."""
        return sum(map(int, _stat(self.engine)[11:13])) / os.sysconf("SC_CLK_TCK")

    def wait_until_busy(self, idle_seconds: float) -> None:
        """Until the device is at work; `idle_seconds` are the `engine_seconds` of before it had any."""
        eventually(lambda: self.engine_seconds() > idle_seconds + 0.2)

    def connections_of(self, frontend: int) -> int:
        """How many connections of callers a front-end holds."""
        port = f":{int(self.address.rpartition(':')[2]):04X}"
        established = "01"
        inodes = {
            fields[9]
            for table in ("tcp", "tcp6")  # an IPv4 address may be bound by a socket for both
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
            if (fields := line.split())[1].endswith(port) and fields[3] == established
        }
        files = []
        for file in Path(f"/proc/{frontend}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                files.append(os.readlink(file))
        return sum(file.removeprefix("socket:[").removesuffix("]") in inodes for file in files)

    def exit_code(self) -> int:
        """Of a server that ends by itself, or has been told to."""
        return self.process.wait(WAIT_S)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.exit_code()

    def assert_nothing_left(self) -> None:
        """Of a server that has ended: no process, no file, no shared memory."""
        assert list(self.temporary.iterdir()) == []
        assert not [name for name in os.listdir("/dev/shm") if "opticnerve" in name]


def _birth(pid: int) -> int:
    """When a process was born, in clock ticks since the machine was."""
    return int(_stat(pid)[19])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, the state first."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


SLOWLY = {"OMP_NUM_THREADS": "1"}
"""The environment of a server whose device is slow: HEAVY keeps it at work for seconds."""

HEAVY = (1664, 1664)
"""Height and width of an image of 2704 tokens."""


def has_ended(pid: int) -> bool:
    try:
        return _stat(pid)[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@contextmanager
def running(
    model: Path, directory: Path, *flags: str, program: Sequence[str | Path] = (PROGRAM,), **environment: str
) -> Iterator[RunningServer]:
    """A server from ready to stopped. One that still runs at the end must stop with 0 and leave nothing behind."""
    server = RunningServer(model, directory, *flags, program=program, **environment)
    try:
        server.wait_until_ready()
        yield server
        if server.process.poll() is None:
            assert server.stop() == 0
            server.assert_nothing_left()
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


@dataclass(frozen=True)
class Official:
    """A server of a random model that transformers has saved in `directory`, and can load."""

    architecture: str
    directory: Path
    server: RunningServer

    @property
    def patch(self) -> int:
        return 14 if self.architecture == "qwen2_5_vl" else 16
