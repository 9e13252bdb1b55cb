"""The dashboard and the rules ask only for what servers export; every alert can be looked up."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics import MetricWrapperBase

from opticnerve_server import metrics

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RUNBOOK = DEPLOY.parent / "docs" / "runbook.md"
RULES = {name: (DEPLOY / "prometheus" / name).read_text() for name in ("rules.yaml", "alerts.yaml")}
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "opticnerve.json").read_text())

TARGET_LABELS = {"namespace", "release", "pod"}
"""What whoever scrapes adds to every series: prometheus.yaml, or the chart."""

OTHERS = {
    "DCGM_FI_DEV_GPU_UTIL",
    "container_cpu_usage_seconds_total",
    "kube_pod_container_status_restarts_total",
}
"""Metrics of a cluster's usual exporters."""


def exported() -> dict[str, set[str]]:
    """The labels of every sample that a server exports, by its name."""
    declared = [value for value in vars(metrics).values() if isinstance(value, MetricWrapperBase)]
    declared.append(metrics.batch_tokens_histogram([64]))
    samples: dict[str, set[str]] = {}
    for metric in declared:
        labels = set(metric._labelnames)
        match metric._type:
            case "counter":
                samples[f"{metric._name}_total"] = labels
            case "histogram":
                samples |= {f"{metric._name}_{part}": labels for part in ("sum", "count")}
                samples[f"{metric._name}_bucket"] = labels | {"le"}
            case _:
                samples[metric._name] = labels
    return samples


def metric_of(sample: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", sample)


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """Where a query is, and the query."""
    for panel in panels():
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for file, text in RULES.items():
        for number, block in enumerate(re.split(r"\n *- (?:record|alert): ", text)[1:]):
            query = re.search(r"expr: (.*?)(?=\n +(?:for|labels|#)|\Z)", block, re.DOTALL)
            assert query
            yield f"{file} {number}", query[1]


QUERIES = dict(queries())
RECORDED = set(re.findall(r"record: (\S+)", RULES["rules.yaml"]))


def selectors(query: str) -> Iterator[tuple[str, set[str]]]:
    """Every metric of a query with the labels that it is selected by."""
    for name, matchers in re.findall(rf"\b(opticnerve[\w:]*|{'|'.join(OTHERS)})(?:{{([^}}]*)}})?", query):
        yield name, set(re.findall(r"(\w+) *(?:=|!)", matchers))


def grouped(query: str) -> set[str]:
    """The labels that results of a query are grouped or joined by."""
    groups = re.findall(r"\b(?:by|on) \(([^)]*)\)", query)
    return {label.strip() for group in groups for label in group.split(",")}


def test_there_are_queries() -> None:
    assert len(QUERIES) > 50
    assert {name for query in QUERIES.values() for name, _ in selectors(query)} > {
        "opticnerve:hit_ratio:rate5m",
        "opticnerve_phase",
        "opticnerve_request_duration_seconds_bucket",
        *OTHERS,
    }


@pytest.mark.parametrize("place", QUERIES)
def test_a_query_asks_for_what_there_is(place: str) -> None:
    query = QUERIES[place]
    samples = exported() | {name: {"path"} for name in RECORDED} | {name: {"container"} for name in OTHERS}
    asked = dict(selectors(query))
    assert asked
    assert set(asked) <= set(samples)
    for name, labels in asked.items():
        assert labels <= samples[name] | TARGET_LABELS
    assert grouped(query) <= TARGET_LABELS.union(*(samples[name] for name in asked))


def test_every_metric_is_looked_at() -> None:
    asked = {name for query in QUERIES.values() for name, _ in selectors(query)}
    assert {metric_of(name) for name in exported()} == {metric_of(name) for name in asked & set(exported())}


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_legend_names_labels_that_its_query_keeps(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        kept = grouped(target["expr"])
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            names = {label for name, _ in selectors(target["expr"]) for label in exported().get(name, ())}
            assert label in (kept if kept else names | TARGET_LABELS)


def test_panels_lie_side_by_side_and_read_the_data_source_of_the_variable() -> None:
    cells = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        covered = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert all(x < 24 for x, _ in covered)
        assert not covered & cells
        cells |= covered
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    sources = {json.dumps(panel["datasource"]) for panel in panels()}
    sources |= {json.dumps(target["datasource"]) for panel in panels() for target in panel["targets"]}
    assert sources == {json.dumps({"type": "prometheus", "uid": "${datasource}"})}


def test_every_alert_has_an_entry_in_the_runbook_and_a_test() -> None:
    alerts = set(re.findall(r"alert: (\S+)", RULES["alerts.yaml"]))
    links = re.findall(r"runbook_url: (\S+)", RULES["alerts.yaml"])
    assert len(links) == len(re.findall(r"alert: ", RULES["alerts.yaml"]))
    assert set(links) == {f"docs/runbook.md#{alert.lower()}" for alert in alerts}
    assert alerts <= set(re.findall(r"^## (\S+)$", RUNBOOK.read_text(), re.MULTILINE))
    assert alerts == set(re.findall(r"alertname: (\w+)", (DEPLOY / "prometheus" / "tests.yaml").read_text()))


def test_every_panel_that_our_own_server_cannot_fill_has_a_test() -> None:
    tested = " ".join((DEPLOY / "prometheus" / "tests.yaml").read_text().split())
    for panel in panels():
        for target in panel["targets"]:
            query = re.sub(r"\$(namespace|pod)", ".*", target["expr"]).replace("$__rate_interval", "5m")
            if any(name in query for name in OTHERS):
                assert query in tested


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "command", ["check config prometheus.yaml", "check rules rules.yaml alerts.yaml", "test rules tests.yaml"]
)
def test_promtool_agrees(command: str) -> None:
    ran = subprocess.run(
        ["promtool", *command.split()], cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
