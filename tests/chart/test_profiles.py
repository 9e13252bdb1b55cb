"""Every profile of values passes Helm's lint, renders, and is what Kubernetes and the operators take."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from helm import CHART, PROFILES, RELEASE, Object, helm, named, of_kind, pod, render, template

OLDEST, NEWEST = "1.30", "1.37"
CRDS = {
    kind: json.loads((Path(__file__).with_name("crds") / f"{kind.lower()}.json").read_text())
    for kind in ("PodMonitor", "PrometheusRule", "ScaledObject")
}
"""Of the kinds that Kubernetes does not know: the parts that the chart uses, strictly."""

ALWAYS = ["ConfigMap", "Deployment", "Pod", "Service", "Service", "Service"]
BESIDE = {
    "default": [],
    "gpu": [],
    "tls-token": ["NetworkPolicy"],
    "keda": ["PodDisruptionBudget", "PodMonitor", "ScaledObject"],
    "hpa": ["HorizontalPodAutoscaler", "PodDisruptionBudget"],
    "monitoring": ["ConfigMap", "NetworkPolicy", "PodMonitor", "PrometheusRule", "PrometheusRule"],
    "cpu-demo": [],
    "multi-replica": ["PodDisruptionBudget"],
}
"""The kinds of a profile beside those of every one."""


@pytest.fixture(params=PROFILES, ids=lambda path: path.name.removesuffix("-values.yaml"))
def profile(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_every_profile_is_told_of() -> None:
    assert {path.name.removesuffix("-values.yaml") for path in PROFILES} == set(BESIDE)


def test_a_profile_renders_what_kubernetes_takes(profile: Path) -> None:
    lint = helm("lint", "--strict", CHART, "--values", profile)
    assert lint.returncode == 0, lint.stdout
    objects = render(profile)
    name = profile.name.removesuffix("-values.yaml")
    kinds = sorted(item["kind"] for item in objects)
    hidden = ["Pod"] if name == "tls-token" else []  # without a caller's certificate there is nothing to test with
    assert kinds == sorted([kind for kind in ALWAYS if kind not in hidden] + BESIDE[name])
    for item in objects:
        if item["kind"] in CRDS:
            jsonschema.validate(item, CRDS[item["kind"]])
            continue
        for version in (OLDEST, NEWEST):
            kubernetes_validate.validate(item, version, strict=True)


def test_the_oldest_kubernetes_is_the_one_that_the_chart_asks_for() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"
    assert template(named("default")).returncode == 0
    old = helm("template", RELEASE, CHART, "--values", named("default"), "--kube-version", "1.29.0")
    assert "incompatible with Kubernetes" in old.stderr


def test_an_unknown_field_is_found() -> None:
    """The validators can say no."""
    objects = render(named("keda"))
    (deployment,) = of_kind(objects, "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["startupProbe"]["grpc"]["servce"] = "startup"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, NEWEST, strict=True)
    (scaled,) = of_kind(objects, "ScaledObject")
    scaled["spec"]["triggers"][0]["metadata"]["treshold"] = "1"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(scaled, CRDS["ScaledObject"])


def test_every_selector_finds_the_pods(profile: Path) -> None:
    objects = render(profile)
    (deployment,) = of_kind(objects, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    selectors = [deployment["spec"]["selector"]["matchLabels"]]
    selectors += [service["spec"]["selector"] for service in of_kind(objects, "Service")]
    for kind, key in (
        ("PodDisruptionBudget", "selector"),
        ("NetworkPolicy", "podSelector"),
        ("PodMonitor", "selector"),
    ):
        selectors += [item["spec"][key]["matchLabels"] for item in of_kind(objects, kind)]
    selectors += [spread["labelSelector"]["matchLabels"] for spread in pod(objects)["topologySpreadConstraints"]]
    for selector in selectors:
        assert selector
        assert selector.items() <= labels
    tested = of_kind(objects, "Pod")
    assert not any(selectors[0].items() <= test["metadata"]["labels"].items() for test in tested)


def test_every_mount_has_its_volume(profile: Path) -> None:
    spec = pod(render(profile))
    volumes = {volume["name"] for volume in spec["volumes"]}
    mounted: set[str] = set()
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        mounted |= {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == volumes


def test_nobody_is_root_or_can_write(profile: Path) -> None:
    objects = render(profile)
    specs: list[Object] = [pod(objects), *(test["spec"] for test in of_kind(objects, "Pod"))]
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_a_scaler_alone_says_how_many_there_are() -> None:
    for profile, replicas in (("multi-replica", 4), ("keda", None), ("hpa", None)):
        (deployment,) = of_kind(render(named(profile)), "Deployment")
        assert deployment["spec"].get("replicas") == replicas
