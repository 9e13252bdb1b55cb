"""The measurement of paths: what it runs, and the table that it prints; the times themselves are no test's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fake_tower import FakeTower
from opticnerve_server.bench import paths
from opticnerve_server.models.base import ImageItem
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.types import Capacity


def test_every_path_is_run_by_itself_on_exactly_its_batch() -> None:
    tower = FakeTower(bands=2)
    with torch.inference_mode():
        rows = paths.measure(tower, ImageItem(16, 32), [1, 4], repeats=3)
    assert [(row.path, row.images, row.units, row.rows) for row in rows] == [
        ("main", 1, 32, 64),
        ("main", 4, 128, 256),
        ("side", 1, 2, 2),
        ("side", 4, 8, 8),
    ]
    assert all(row.replay_ms > 0 and row.eager_ms > 0 for row in rows)
    # A capture, then 2 warm-ups and 3 repeats of a replay, and as many eagerly: 128 units are rounded to themselves.
    for path, capacity in (("main", Capacity(128, 4, 8, 32)), ("side", Capacity(8, 4, 4, 1))):
        assert tower.forwards.count((path, capacity)) == 11
    with torch.inference_mode():
        assert {row.path for row in paths.measure(tower, ImageItem(16, 16), [1], repeats=1)} == {"main"}


def test_the_command_prints_a_table_from_a_configuration_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint("llama4", tmp_path / "tiny")
    (tmp_path / "tiny" / "model.safetensors").unlink()
    model = ["--model", str(tmp_path / "tiny"), "--device", "cpu", "--dtype", "float32"]
    paths.main([*model, "--image", "100x200", "--images", "4", "1", "--repeats", "1"])
    said, _, table = capsys.readouterr().out.partition("\n\n")
    assert "an image of 100 x 200 pixels: 36 tokens (tile, global)" in said
    header, rule, *rows = table.strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (header, *rows)]
    assert cells[0] == ["model", "path", "images", "units", "rows", "replay ms", "eager ms", "eager / replay"]
    assert rule.count("|") == header.count("|")
    assert [row[:5] for row in cells[1:]] == [
        ["tiny", "default", "1", "9", "153"],
        ["tiny", "default", "4", "36", "612"],
    ]
    for *_, replay, eager, ratio in cells[1:]:
        assert float(ratio) == pytest.approx(float(eager) / float(replay), rel=0.05)
