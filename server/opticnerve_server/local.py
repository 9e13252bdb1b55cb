"""A server of one's own on loopback, for what measures and tries one: soak and bench."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from .config import Config
from .settings import settings_of, text, variable

STOP_S = 60.0


class LocalServer:
    """`serve` with these settings, at addresses of its own, from ready to stopped, as a context.

    Raises RuntimeError with the end of its log if it does not come to serve.
    """

    def __init__(self, config: Config) -> None:
        self._timeout = config.startup_timeout
        addresses = dict.fromkeys(("listen", "health_listen", "metrics_listen"), "127.0.0.1:0")
        given = {name: getattr(config, name) for name in settings_of(Config)} | addresses
        self._variables = os.environ | {variable(name): text(value) for name, value in given.items()}
        self.exit_code: int | None = None

    def __enter__(self) -> Self:
        self._log = tempfile.NamedTemporaryFile("w", prefix="opticnerve-", suffix=".log")
        command = [sys.executable, "-m", "opticnerve_server.cli", "serve"]
        self._process = subprocess.Popen(command, stdout=self._log, env=self._variables)  # noqa: S603
        try:
            self.address, self._metrics = self._listening()
        except BaseException:
            self._process.kill()
            self._process.wait()
            self._log.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self.exit_code = self._process.wait(STOP_S)
        finally:
            self._process.kill()
            self._log.close()

    def _listening(self) -> tuple[str, str]:
        until = time.monotonic() + self._timeout
        while True:
            log = Path(self._log.name).read_text()
            events = {line["event"]: line for line in map(json.loads, log.split("\n")[:-1])}
            if "ready" in events:
                return events["listening"]["listen"], events["listening"]["metrics_listen"]
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server does not serve:\n{log[-2000:]}")
            time.sleep(0.1)

    def total(self, name: str, **labels: str) -> float:
        """Sum over all samples of a metric with these labels, now."""
        return self.totals((name, labels))[0]

    def totals(self, *wanted: tuple[str, dict[str, str]]) -> list[float]:
        """The same for several at one moment."""
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        samples = [sample for family in families for sample in family.samples]
        return [
            sum(sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items())
            for name, labels in wanted
        ]

    def memory(self) -> int:
        """Bytes that its processes hold beside the shared memory."""
        lines = [line for process in self._processes() for line in (process / "status").read_text().splitlines()]
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

    def files(self) -> int:
        """Open file descriptors."""
        return sum(1 for process in self._processes() for _ in (process / "fd").iterdir())

    def _processes(self) -> Iterator[Path]:
        """The folders in /proc of the server and its children."""
        yield Path(f"/proc/{self._process.pid}")
        for children in Path(f"/proc/{self._process.pid}/task").glob("*/children"):
            yield from (Path(f"/proc/{pid}") for pid in children.read_text().split())
