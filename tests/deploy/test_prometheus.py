"""A real Prometheus scrapes a real server under load: every query of the dashboard is answered, all rules evaluate."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import opticnerve
from opticnerve.errors import ModelNotLoadedError
from opticnerve_server import cli
from panels import ask, draw, panels, series_of
from running_server import RunningServer, eventually, running

pytestmark = pytest.mark.deploy

DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"
OTHERS = ("DCGM_", "container_", "kube_")
LOAD_S = 40.0


@contextmanager
def scraping(server: RunningServer, directory: Path) -> Iterator[str]:
    """The address of a Prometheus with our configuration, but for the interval and the address of the server."""
    for rules in ("rules.yaml", "alerts.yaml"):
        shutil.copy(DEPLOY / rules, directory)
    text = (DEPLOY / "prometheus.yaml").read_text().replace("15s", "1s").replace("server:9090", server.metrics_address)
    (directory / "prometheus.yaml").write_text(text)
    address = "127.0.0.1:19090"
    command = ["prometheus", "--config.file=prometheus.yaml", f"--web.listen-address={address}", "--log.level=warn"]
    process = subprocess.Popen(command, cwd=directory)
    try:
        eventually(lambda: _answers(f"http://{address}/-/ready"))
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(url).status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


async def load(server: RunningServer, seconds: float) -> None:
    """Small images, repeated ones, some over every budget, some that are none, and calls for another model."""
    until = time.monotonic() + seconds

    async def caller(seed: int) -> None:
        random = np.random.default_rng(seed)
        async with (
            opticnerve.AsyncClient(server.address) as client,
            opticnerve.AsyncClient(server.address, model="another") as mistaken,
        ):
            while time.monotonic() < until:
                size = random.choice([64, 128, 256, 640], p=[0.4, 0.3, 0.28, 0.02])
                image = np.full((size, size, 3), random.integers(256), np.uint8)
                broken = [b"no image"] * (random.random() < 0.05)
                async for _ in client.encode([image, *broken], return_errors=True):
                    pass
                if random.random() < 0.02:
                    with pytest.raises(ModelNotLoadedError):
                        await anext(mistaken.encode([image]))

    await asyncio.gather(*map(caller, range(8)))


async def test_every_query_has_an_answer(tmp_path: Path) -> None:
    assert cli.main(["make-checkpoint", "--arch", "qwen3_vl", "--out", str(tmp_path / "model")]) == 0
    flags = ("--token-budgets", "64,128,256", "--store-bytes", "2000000")
    with running(tmp_path / "model", tmp_path, *flags) as server, scraping(server, tmp_path) as prometheus:
        await load(server, LOAD_S)
        end = time.time()
        silent = [
            f"{panel['title']}: {target['expr']}"
            for panel in panels()
            for target in panel.get("targets", [])
            if not series_of(prometheus, target, end, LOAD_S - 10, "5s")
        ]
        draw(prometheus, tmp_path / "dashboard.png", LOAD_S + 5)
        print(tmp_path / "dashboard.png")
        rules = [rule for group in ask(prometheus, "rules")["groups"] for rule in group["rules"]]
        recorded = {name: ask(prometheus, "query", query=name)["result"] for name in recorded_names()}
    assert [query for query in silent if not any(other in query for other in OTHERS)] == []
    assert len(silent) == len(OTHERS), "a test without a cluster cannot answer for its exporters"
    assert {rule["health"] for rule in rules} == {"ok"}
    assert {rule["name"] for rule in rules if rule.get("state") == "firing"} <= {"OpticnerveErrorBudgetBurn"}
    assert all(recorded.values()), recorded
    assert all(0 <= float(one["value"][1]) <= 10 for result in recorded.values() for one in result)


def recorded_names() -> list[str]:
    return re.findall(r"record: (\S+)", (DEPLOY / "rules.yaml").read_text())
