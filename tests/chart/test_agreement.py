"""The chart and the server agree: what pods are told is what the server reads, answers to, and takes to stop."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from helm import CHART, PROFILES, Object, named, of_kind, pod, render, server
from opticnerve_server import cli, lifecycle
from opticnerve_server.config import Config, load
from opticnerve_server.health import SERVING, statuses
from opticnerve_server.settings import settings_of
from opticnerve_server.types import Phase

GIB = 1 << 30
DURATIONS = ("startup_timeout", "drain_delay", "grace")


@pytest.fixture(params=PROFILES, ids=lambda path: path.name.removesuffix("-values.yaml"))
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return render(request.param)


def configuration(objects: list[Object], directory: Path) -> Config:
    """What the server itself makes of its container's arguments and of the configuration file that is mounted."""
    file = directory / "config.toml"
    file.write_text(of_kind(objects, "ConfigMap")[0]["data"]["config.toml"])
    arguments = [
        f"--config={file}" if word == "--config=/etc/opticnerve/config.toml" else word.replace("$(POD_IP)", "10.1.2.3")
        for word in server(objects)["args"]
    ]
    assert f"--config={file}" in arguments
    options = vars(cli._parser().parse_args(arguments))
    names = {"config"} | settings_of(Config).keys()
    resolved = load({name: value for name, value in options.items() if name in names}, {})
    assert resolved.warnings == []
    return resolved.config


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_probes_ports_names_and_grace_are_those_of_the_server(objects: list[Object], tmp_path: Path) -> None:
    config, container = configuration(objects, tmp_path), server(objects)
    listens = {"grpc": config.listen, "health": config.health_listen, "metrics": config.metrics_listen}
    assert {entry["name"]: entry["containerPort"] for entry in container["ports"]} == {
        name: port(address) for name, address in listens.items()
    }
    assert all(address.startswith("0.0.0.0:") for address in listens.values())
    assert config.advertise == f"10.1.2.3:{port(config.listen)}"

    probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
    serving = statuses(Phase.READY, started=True)
    for kind, probe in probes.items():
        assert probe["grpc"] == {"port": port(config.health_listen), "service": kind}
        assert serving[kind] == SERVING
    window = probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"]
    assert window > config.startup_timeout, "the kubelet must not end a start before the server says what is wrong"
    (deployment,) = of_kind(objects, "Deployment")
    assert deployment["spec"]["progressDeadlineSeconds"] > window

    sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    needed = sleep + config.drain_delay + config.grace + 2 * lifecycle.EXIT_S  # front-ends, then the engine
    assert pod(objects)["terminationGracePeriodSeconds"] >= needed


def test_services_reach_the_ports_by_name(objects: list[Object]) -> None:
    names = {entry["name"] for entry in server(objects)["ports"]}
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind(objects, "Service")}
    assert {entry["targetPort"] for spec in services.values() for entry in spec["ports"]} == {"grpc", "metrics"} < names
    (cluster,) = (spec for name, spec in services.items() if not name.endswith(("-headless", "-metrics")))
    assert cluster["type"] == "ClusterIP"
    (headless,) = (spec for name, spec in services.items() if name.endswith("-headless"))
    assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", False)


def test_the_memory_limit_is_over_the_shared_memory(objects: list[Object], tmp_path: Path) -> None:
    limit = server(objects)["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    assert int(limit.removesuffix("Gi")) * GIB >= configuration(objects, tmp_path).arena_bytes + 2 * GIB


def test_a_profile_without_secrets_mounts_none_and_one_with_them_mounts_all(
    objects: list[Object], tmp_path: Path
) -> None:
    config = configuration(objects, tmp_path)
    mounts = [mount["mountPath"] for mount in server(objects)["volumeMounts"]]
    for path in (config.tls_cert, config.tls_key, config.tls_client_ca, config.auth_token_file):
        assert not path or Path(path).parent.as_posix() in mounts
    secret = [volume["secret"]["secretName"] for volume in pod(objects)["volumes"] if "secret" in volume]
    assert secret == (["opticnerve-tls", "opticnerve-tokens"] if config.tls_cert else [])


def test_the_durations_of_the_values_are_the_servers_defaults() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    defaults = {field.name: field.default for field in fields(Config)}
    assert values["server"] == {name: defaults[name] for name in DURATIONS}


def test_a_number_of_bytes_arrives_as_digits(tmp_path: Path) -> None:
    """A YAML number is a float to Helm, which likes to write 8589934592 as 8.589934592e+09."""
    values = tmp_path / "values.yaml"
    values.write_text(named("default").read_text() + "server: {store_bytes: 8589934592, grace: 2.5}\n")
    objects = render(values)
    config = configuration(objects, tmp_path)
    assert (config.store_bytes, config.grace) == (8 * GIB, 2.5)
    assert pod(objects)["terminationGracePeriodSeconds"] == 18


def test_every_gpu_profile_asks_for_one_gpu_and_the_demo_for_none(objects: list[Object], tmp_path: Path) -> None:
    wanted = 0 if configuration(objects, tmp_path).device == "cpu" else 1
    assert server(objects)["resources"]["limits"].get("nvidia.com/gpu", 0) == wanted


def test_the_container_of_the_weights_speaks_the_servers_command_line() -> None:
    for profile, source in (("gpu", "download"), ("cpu-demo", "make-checkpoint")):
        objects = render(named(profile))
        (container,) = pod(objects)["initContainers"]
        options = cli._parser().parse_args(container["args"])
        assert container["args"][0] == source
        assert f"--model={options.out}" in server(objects)["args"]


def test_what_the_chart_repeats_is_current() -> None:
    check = [sys.executable, CHART.parent / "generate.py", "--check"]
    run = subprocess.run(check, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
