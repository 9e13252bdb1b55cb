"""What a scaler asks for is exported by servers, and of this release's pods alone."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from helm import NAMESPACE, named, of_kind, render
from opticnerve_server import metrics
from opticnerve_server.metrics import Stage


def queries() -> list[str]:
    (scaled,) = of_kind(render(named("keda")), "ScaledObject")
    return [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]


def test_both_scalers_ask_for_tokens_that_are_queued() -> None:
    tokens, seconds = queries()
    assert re.findall(r"opticnerve_\w+", tokens) == [metrics.QUEUE_TOKENS._name]
    assert re.findall(r"opticnerve_\w+", seconds) == [f"{metrics.STAGE_DURATION._name}_bucket"]
    assert f'stage="{Stage.QUEUE}"' in seconds
    (scaler,) = of_kind(render(named("hpa")), "HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == metrics.QUEUE_TOKENS._name


def test_the_pods_are_those_of_the_deployment_and_of_no_other() -> None:
    for query in queries():
        (pods,) = re.findall(r'pod=~"([^"]+)"', query)
        assert re.fullmatch(pods, "vision-opticnerve-7d9f8b6c5d-x2x4z")
        assert not re.fullmatch(pods, "vision-opticnerve-canary-7d9f8b6c5d-x2x4z")
        assert f'namespace="{NAMESPACE}"' in query


@pytest.mark.skipif(not (PROMTOOL := shutil.which("promtool")), reason="promtool is not installed: Debian's prometheus")
def test_prometheus_understands_the_queries() -> None:
    assert PROMTOOL
    rules = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(queries())]
    text = str({"groups": [{"name": "scaling", "rules": rules}]})  # YAML reads Python's literals of strings and numbers
    run = subprocess.run([PROMTOOL, "check", "rules", "/dev/stdin"], input=text, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr + run.stdout
