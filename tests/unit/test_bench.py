"""The benches that need no device: what they print follows from what they measured."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from opticnerve_server import cli
from opticnerve_server.bench.scaling import Row, equality
from opticnerve_server.bench.serve import Run, markdown
from opticnerve_server.metrics import Stage


def test_preprocess_measures_every_size_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "preprocess", "--repeats", "1", "--sizes", "64x96", "640x320"]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [(row[0], row[2]) for row in rows] == [("64x96", "70"), ("640x320", "200")]  # of 32 x 32 pixels
    for row in rows:
        *steps, whole = map(float, row[3:7])
        assert all(ms >= 0 for ms in steps)
        assert sum(steps) == pytest.approx(whole, abs=0.02)


def test_a_bench_that_does_not_exist_is_refused_with_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["bench", "towers"])
    assert error.value.code == 2
    assert "tower" in capsys.readouterr().err


@pytest.mark.parametrize("bench", ["paths", "serve", "preprocess", "hits"])
@pytest.mark.parametrize("written", ["480", "480x", "0x640", "480x-640", "axb"])
def test_what_is_no_size_is_refused_with_how_to_write_one(
    bench: str, written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    option = "--sizes" if bench in ("serve", "preprocess") else "--image"
    with pytest.raises(SystemExit) as error:
        cli.main(["bench", bench, option, written])
    assert error.value.code == 2
    assert f"'{written}' is no size: write height x width in pixels, such as 480x640" in capsys.readouterr().err


def test_a_load_on_a_model_that_is_not_there_is_refused_before_any_server_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", "serve", "--model", "/nowhere"]) == 2
    assert "/nowhere" in capsys.readouterr().err


def load_figures() -> dict[str, Any]:
    stages = {str(stage): float(number) for number, stage in enumerate(Stage)}
    common = {"calls": 9, "failed": 1, "tokens_s": 400.0, "megabytes_s": 3.3, "p50": 1.0, "p90": 2.0, "p99": 30.25}
    runs = [Run(0.0, items_s=4.0, hit=1.0, padding=0.1, busy=0.99, stages=stages, **common)]
    runs.append(Run(0.5, items_s=2.0, hit=0.25, padding=0.0, busy=0.5, stages=stages, **common))
    return {"bench": "serve", "model": "m", "about": "what", "runs": [asdict(run) for run in runs]}


def test_the_tables_of_a_load() -> None:
    about, first, second = markdown(load_figures()).split("\n\n")
    assert about == "m, what"
    assert first.splitlines()[2] == "| saturated | 4.0 | 400 | 3.3 | 1.0 | 2.0 | 30.2 | 1 | 100% | 10% | 99% |"
    assert first.splitlines()[3].startswith("| 50% | 2.0 |")
    assert second.splitlines()[2] == "| saturated | 0.00 | 1.00 | 2.00 | 3.00 | 4.00 | 5.00 |"


def test_scaling_is_refused_on_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["bench", "scaling", "--model", "/nowhere", "--device", "cpu"])
    assert error.value.code == 2
    assert "name more with --devices" in capsys.readouterr().err


def test_rows_are_compared_where_every_device_has_run_them() -> None:
    first, second = (0, 0), (1, 1)
    seen = {
        (224, 64): {first: {b"a"}, second: {b"a"}},
        (224, 128): {first: {b"b"}, second: {b"c"}},
        (336, 128): {first: {b"d", b"e"}},
    }
    assert equality(seen, [first, second]) == {"compared": 2, "differing": 1}
    assert equality(seen, [first]) == {"compared": 3, "differing": 1}


def test_a_row_of_scaling_has_a_ratio_unless_there_is_nothing_to_divide_by() -> None:
    assert str(Row(True, "336", "images/s", 1000.0, 1950.0)).split() == [
        "replay",
        "336",
        "images/s",
        "1000.000",
        "1950.000",
        "1.950x",
    ]
    assert str(Row(False, "equal", "differing", 0, 0)).split() == ["eager", "equal", "differing", "0.000", "0.000"]


def test_a_load_is_drawn_from_what_was_measured_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, drawn = tmp_path / "load.json", tmp_path / "load.svg"
    figures.write_text(json.dumps(load_figures()))
    assert cli.main(["bench", "serve", "--from", str(figures), "--plot", str(drawn)]) == 0
    assert "| saturated | 4.0 |" in capsys.readouterr().out
    svg = drawn.read_text()
    for said in ("images a second", "milliseconds", "p99", "percent", "dispatches that replay a graph"):
        assert f">{said}</text>" in svg


@pytest.mark.parametrize("bench", ["tower", "ceiling", "serve"])
def test_figures_that_are_none_and_plots_that_cannot_be_are_refused_before_anything_is_measured(
    bench: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: str) -> str:
        assert cli.main(["bench", bench, *arguments]) == 2
        return capsys.readouterr().err

    other = tmp_path / "other.json"
    other.write_text('{"bench": "hits"}')
    with pytest.raises(SystemExit) as error:
        cli.main(["bench", bench, "--plot", "plot.pdf"])
    assert error.value.code == 2
    assert "let it end with .svg or .png" in capsys.readouterr().err
    assert f"has no figures of bench {bench}" in refused("--from", str(other))
    assert "cannot read --from /nowhere.json" in refused("--from", "/nowhere.json")
    assert "cannot write /nowhere/plot.svg" in refused("--plot", "/nowhere/plot.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    assert "pip install 'opticnerve[server,bench]'" in refused("--plot", "plot.svg")
