"""What the Dockerfile says agrees with the server, the package, and the chart that runs the image."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from helm import named, render, server
from opticnerve_server import __version__
from opticnerve_server.config import Config
from opticnerve_server.settings import settings_of, variable

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = Config(model="model")
VALUES = yaml.safe_load((ROOT / "helm/opticnerve/values.yaml").read_text())


@pytest.fixture(scope="module")
def instructions() -> list[str]:
    """One instruction a string, its lines joined, without comments."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    return re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()


def the(instructions: list[str], name: str) -> str:
    """The last instruction of this name, which is that of the image."""
    return [line.removeprefix(f"{name} ") for line in instructions if line.startswith(f"{name} ")][-1]


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_it_listens_on_the_servers_own_ports_of_every_address(instructions: list[str]) -> None:
    environment = dict(word.split("=", 1) for word in the(instructions, "ENV").split())
    ours = {name: value for name, value in environment.items() if name.startswith("OPTICNERVE_")}
    names = ("listen", "health_listen", "metrics_listen")
    assert set(names) <= settings_of(Config).keys()
    assert ours == {variable(name): f"0.0.0.0:{port(getattr(DEFAULTS, name))}" for name in names}
    ports = [port(getattr(DEFAULTS, name)) for name in names]
    assert the(instructions, "EXPOSE").split() == [str(each) for each in ports]
    assert list(VALUES["ports"].values()) == ports
    check = json.loads(the(instructions, "HEALTHCHECK").partition(" CMD ")[2])
    assert check == ["opticnerve", "health", "--server", f"127.0.0.1:{port(DEFAULTS.health_listen)}", "readiness"]
    assert "--start-period=15m" in the(instructions, "HEALTHCHECK")
    assert DEFAULTS.startup_timeout == 15 * 60


def test_signals_reach_the_server_which_is_not_root(instructions: list[str]) -> None:
    assert json.loads(the(instructions, "ENTRYPOINT")) == ["opticnerve-server"]
    assert json.loads(the(instructions, "CMD")) == [server(render(named("default")))["args"][0]]
    context = VALUES["podSecurityContext"]
    assert the(instructions, "USER") == f"{context['runAsUser']}:{context['runAsGroup']}"


def test_what_is_written_goes_where_the_chart_mounts_something(instructions: list[str]) -> None:
    environment = dict(word.split("=", 1) for word in the(instructions, "ENV").split())
    mounts = {
        mount["mountPath"] for mount in server(render(named("default")))["volumeMounts"] if "readOnly" not in mount
    }
    assert mounts == {environment["HOME"], "/tmp"}


def test_it_is_of_this_version_and_of_extras_that_there_are(instructions: list[str]) -> None:
    assert f"ARG VERSION={__version__}" in instructions
    chart = yaml.safe_load((ROOT / "helm/opticnerve/Chart.yaml").read_text())
    assert chart["appVersion"] == __version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "Dockerfile").read_text()
    named = [word for extras in re.findall(r'EXTRAS="([^"]+)"', text) for word in extras.split()]
    assert {"server", "hub"} <= set(named) <= project["optional-dependencies"].keys()


def test_bases_are_pinned_and_the_context_is_what_is_copied(instructions: list[str]) -> None:
    bases = [line for line in instructions if line.startswith(("ARG CUDA=", "ARG CPU="))]
    assert len(bases) == 2
    assert all(re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", base) for base in bases)
    copied = {
        word
        for line in instructions
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    }
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)
