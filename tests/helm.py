"""The chart as a real Helm renders it."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

HELM = Path(sys.executable).with_name("helm")
CHART = Path(__file__).resolve().parents[1] / "helm/opticnerve"
PROFILES = sorted(CHART.glob("ci/*-values.yaml"))
RELEASE, NAMESPACE = "vision", "encoders"

Object = dict[str, Any]


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """One run of Helm; fails where it is not installed."""
    assert HELM.exists(), f"there is no {HELM}: make test installs it"
    return subprocess.run([HELM, *arguments], capture_output=True, text=True)


def template(values: Path | None, *settings: str) -> subprocess.CompletedProcess[str]:
    """`helm template` with a file of values and `--set` settings."""
    files = [] if values is None else ["--values", values]
    sets = [word for setting in settings for word in ("--set", setting)]
    return helm("template", RELEASE, CHART, "--namespace", NAMESPACE, *files, *sets)


def render(values: Path, *settings: str) -> list[Object]:
    """The objects of a profile that must render, the caller's own."""
    return copy.deepcopy(_rendered(values, *settings))


@functools.cache
def _rendered(values: Path, *settings: str) -> list[Object]:
    run = template(values, *settings)
    assert run.returncode == 0, run.stderr
    return [document for document in yaml.load_all(run.stdout, yaml.CSafeLoader) if document is not None]


def named(profile: str) -> Path:
    return CHART / "ci" / f"{profile}-values.yaml"


def of_kind(objects: Sequence[Object], kind: str) -> list[Object]:
    return [item for item in objects if item["kind"] == kind]


def pod(objects: Sequence[Object]) -> Object:
    """The pod template's spec of the one Deployment."""
    (deployment,) = of_kind(objects, "Deployment")
    spec: Object = deployment["spec"]["template"]["spec"]
    return spec


def server(objects: Sequence[Object]) -> Object:
    """The one container of its pods that stays."""
    (container,) = pod(objects)["containers"]
    assert container["name"] == "opticnerve", "the rules and the dashboard know it by this name"
    found: Object = container
    return found
