"""The report for bug reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opticnerve_server import __version__, cli


def test_json_without_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = tmp_path / "tokens"
    secret.write_text("red:red-token-0123456789")
    assert cli.main(["collect-env", "--json", "--max-queue-items", "7", "--auth-token-file", str(secret)]) == 0
    shown = capsys.readouterr().out
    assert "red-token" not in shown
    report = json.loads(shown)
    assert report["opticnerve"] == __version__
    assert report["packages"]["torch"] == torch.__version__
    assert report["packages"]["grpcio"]
    assert len(report["devices"]) == torch.cuda.device_count()
    assert 1 <= report["cores"]["usable"] <= report["cores"]["machine"]
    assert set(report["cgroup"]) >= {"memory.max", "cpu.max"}
    assert report["settings"]["max_queue_items"] == "7  (from flag --max-queue-items)"


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["collect-env", "--model", "preset:qwen3-vl-2b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"opticnerve: {__version__}" in lines
    assert "  model: preset:qwen3-vl-2b  (from flag --model)" in lines


def test_a_reader_that_has_seen_enough() -> None:
    """As `| head` does: its end of the pipe is closed before all is written."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "opticnerve_server.cli", "collect-env", "--model", "none"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_settings_that_cannot_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["collect-env", "--grace", "soon"]) == 2
    assert "write a number of seconds" in capsys.readouterr().err


def test_the_model_is_what_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPTICNERVE_MODEL", "/models/mine")
    assert cli.main(["collect-env"]) == 0
    assert "  model: /models/mine  (from env OPTICNERVE_MODEL)" in capsys.readouterr().out.splitlines()
