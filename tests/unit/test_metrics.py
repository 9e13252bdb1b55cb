"""The metrics: what a scrape shows, in one process and merged from several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, generate_latest

from opticnerve_server import metrics


def test_a_column_of_the_batch_histogram_is_a_budget() -> None:
    metrics.batch_tokens_histogram([64]).observe(1)
    histogram = metrics.batch_tokens_histogram([512, 64, 64])
    histogram.observe(65)
    text = generate_latest(REGISTRY).decode()
    assert 'opticnerve_batch_tokens_bucket{le="64.0"} 0.0' in text
    assert 'opticnerve_batch_tokens_bucket{le="512.0"} 1.0' in text
    assert text.count("opticnerve_batch_tokens_count") == 1


def test_duration_edges() -> None:
    assert len(metrics.SECONDS) == 15
    assert metrics.SECONDS[0] == 0.0005
    assert 8 < metrics.SECONDS[-1] < 10
    assert metrics.ITEMS_PER_BATCH == (1, 2, 4, 8, 16, 32, 64)


CHILD = """
import os, sys
from opticnerve_server import metrics
from opticnerve_server.types import Phase
metrics.QUEUE_ITEMS.set(3)
metrics.REQUESTS.labels("Encode", "OK").inc()
metrics.GPU_HEARTBEAT.set(float(sys.argv[1]))
metrics.BUILD_INFO.labels("1", "2", "none").set(1)
metrics.STAGE_DURATION.labels(metrics.Stage.QUEUE).observe(0.001)
print(os.getpid())
"""

PARENT = """
import sys
from prometheus_client import generate_latest
from opticnerve_server import metrics
for pid in sys.argv[1:]:
    metrics.forget_process(int(pid))
print(generate_latest(metrics.merged()).decode())
"""


def run(code: str, directory: Path, *arguments: str) -> str:
    environment = os.environ | {metrics.DIRECTORY_VARIABLE: str(directory)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture
def two_processes(tmp_path: Path) -> list[str]:
    return [run(CHILD, tmp_path, "10").strip(), run(CHILD, tmp_path, "30").strip()]


def test_processes_are_merged_without_a_label_for_them(two_processes: list[str], tmp_path: Path) -> None:
    text = run(PARENT, tmp_path)
    assert "opticnerve_queue_items 6.0" in text
    assert 'opticnerve_requests_total{code="OK",method="Encode"} 2.0' in text
    assert "opticnerve_gpu_heartbeat_timestamp_seconds 30.0" in text
    assert 'opticnerve_build_info{cuda="none",torch="2",version="1"} 1.0' in text
    assert 'opticnerve_stage_duration_seconds_bucket{le="0.001",stage="queue"} 2.0' in text
    assert 'opticnerve_items_total{result="expired"} 0.0' in text
    assert "pid=" not in text


def test_a_dead_process_leaves_its_counters_alone(two_processes: list[str], tmp_path: Path) -> None:
    text = run(PARENT, tmp_path, two_processes[0])
    assert "opticnerve_queue_items 3.0" in text
    assert 'opticnerve_requests_total{code="OK",method="Encode"} 2.0' in text
