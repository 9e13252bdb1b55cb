"""What `deploy/` repeats of the server and the client agrees with them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from opticnerve.channel import SERVICE
from opticnerve.digests import DIGEST_HEADER
from opticnerve_server.config import Config

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DEFAULTS = Config(model="model")
ENDING_S = 10
"""What a server may take to end its processes, beyond its drain delay and its grace."""


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_compose_mounts_what_there_is_and_waits_for_the_drain() -> None:
    services = load("compose/compose.yaml")["services"]
    mounts = [mount.split(":")[0] for name in ("prometheus", "grafana") for mount in services[name]["volumes"]]
    files = [mount for mount in mounts if mount.startswith(".")]
    assert len(files) == 6
    assert all((DEPLOY / "compose" / file).is_file() for file in files)
    assert services["server"]["stop_grace_period"] == f"{DEFAULTS.drain_delay + DEFAULTS.grace + ENDING_S:g}s"
    assert port(services["server"]["ports"][0]) == port(DEFAULTS.listen)
    [scrape] = load("prometheus/prometheus.yaml")["scrape_configs"]
    assert scrape["static_configs"][0]["targets"] == [f"server:{port(DEFAULTS.metrics_listen)}"]


def test_the_unit_waits_for_the_drain_and_is_one_that_systemd_takes(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd" / "opticnerve.service").read_text()
    assert f"TimeoutStopSec={DEFAULTS.drain_delay + DEFAULTS.grace + ENDING_S:g}\n" in unit
    if systemd := shutil.which("systemd-analyze"):
        installed = tmp_path / "opticnerve.service"
        installed.write_text(re.sub(r"/opt/\S+/opticnerve-server", sys.executable, unit))
        ran = subprocess.run([systemd, "verify", installed], capture_output=True, text=True, timeout=60)
        assert (ran.returncode, ran.stderr) == (0, "")


def test_envoy_names_what_server_and_client_do() -> None:
    configuration = load("envoy/envoy.yaml")["static_resources"]
    managers = [
        listener["filter_chains"][0]["filters"][0]["typed_config"]["route_config"]["virtual_hosts"][0]
        for listener in configuration["listeners"]
    ]
    assert [host["request_body_buffer_limit"] for host in managers] == [DEFAULTS.max_request_bytes] * 2
    by_content = managers[1]["routes"][1]
    assert by_content["match"]["headers"] == [{"name": DIGEST_HEADER, "present_match": True}]
    assert by_content["route"]["hash_policy"] == [{"header": {"header_name": DIGEST_HEADER}}]
    for cluster in configuration["clusters"]:
        assert cluster["health_checks"][0]["grpc_health_check"] == {"service_name": SERVICE}
        [endpoint] = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        assert endpoint["endpoint"]["address"]["socket_address"]["port_value"] == port(DEFAULTS.listen)


@pytest.mark.skipif(
    not (ENVOY := shutil.which("envoy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")),
    reason="Envoy is not installed",
)
def test_envoy_takes_its_configuration() -> None:
    assert ENVOY
    command = [ENVOY, "--mode", "validate", "--log-level", "warning", "-c", DEPLOY / "envoy" / "envoy.yaml"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, "deprecated" in ran.stderr) == (0, False), ran.stderr
