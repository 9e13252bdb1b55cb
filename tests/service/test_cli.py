"""The server's command line: what `serve`, `check` and `make-checkpoint` print and how they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from opticnerve_server import cli
from opticnerve_server.models.registry import ARCHITECTURES

UMASK = os.umask(0o022)
os.umask(UMASK)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    assert cli.main(["make-checkpoint", "--arch", "qwen3_vl", "--out", str(directory)]) == 0
    return directory


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OPTICNERVE_"):
            monkeypatch.delenv(name)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command refuses; its exit code is 2."""
    code: object
    try:
        code = cli.main(arguments)
    except SystemExit as exit:  # argparse's way
        code = exit.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    return captured.err.splitlines()[-1]


# --- check


def test_check_as_json(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", "--model", str(checkpoint), "--token-budgets", "128,64", "--json", "--device", "cpu"]
    assert cli.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    stored = load_file(checkpoint / "model.safetensors")
    assert report["tensors"] == sum(name.startswith("model.visual.") for name in stored)
    assert (report["model"], report["architecture"], report["dtype"]) == ("tiny", "qwen3_vl", "float32")
    assert (report["hidden"], report["deepstack_levels"]) == (128, 2)
    (path,) = report["paths"]
    assert (path["path"], path["budgets"]) == ("default", [64, 128])
    assert path["max_items"] == 2
    # 128 tokens: 2 x 2 patches a token, 16 x 16 pixels a patch, 2 frames a patch of a video, three bytes a pixel.
    assert path["buffers"]["pixels"] == {"shape": [786432], "dtype": "uint8", "bytes": 128 * 4 * 16 * 16 * 2 * 3}
    assert report["arena_bytes"] >= path["buffer_bytes"] >= sum(b["bytes"] for b in path["buffers"].values())
    assert report["graph_memory_bytes"] > report["arena_bytes"]


def test_check_as_text(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--model", str(checkpoint), "--max-token-budget", "80", "--no-graphs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "architecture       qwen3_vl" in lines
    (row,) = [line for line in lines if line.endswith("64 80")]
    assert row.split()[:2] == ["default", "0"]


def test_check_refuses_a_preset_without_dummy_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert "dummy" in refusal(capsys, "check", "--model", "preset:qwen3-vl-8b")
    assert "qwen3-vl-8b" in refusal(capsys, "check", "--model", "preset:qwen3-vl-9b", "--load-format", "dummy")


def test_check_names_a_missing_tensor(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    lost = next(name for name in tensors if name.endswith("qkv.weight"))
    del tensors[lost]
    for file in ("config.json", "preprocessor_config.json"):
        (tmp_path / file).write_bytes((checkpoint / file).read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    assert lost.removeprefix("model.visual.") in refusal(capsys, "check", "--model", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--token-budgets", "local=64"], "the path local"),
        (["--token-budgets", "0"], "not positive"),
        (["--graph-memory-bytes", "10"], "lower --max-token-budget"),
        (["--max-queue-items", "none"], "whole number"),
        (["--attention-backend", "sdpaa"], "did you mean sdpa?"),
        (["--jsonn"], "did you mean --json?"),
        (["--config", "/nowhere.toml"], "cannot read"),
    ],
)
def test_check_refuses_with_a_remedy(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert said in refusal(capsys, "check", "--model", str(checkpoint), "--device", "cpu", *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_check_refuses_a_device_that_is_not_there(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--device cpu" in refusal(capsys, "check", "--model", str(checkpoint), "--device", "cuda")


# --- serve


def test_serve_refuses_a_model_before_it_takes_any_port(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "config.json" in refusal(capsys, "serve", "--model", str(tmp_path))


def test_serve_without_a_temporary_directory_says_so(checkpoint: Path) -> None:
    ports = [f"--{name}=127.0.0.1:0" for name in ("listen", "health-listen", "metrics-listen")]
    program = (
        "import sys, tempfile; tempfile.tempdir = '/nowhere'; from opticnerve_server.cli import main; "
        f"sys.exit(main(['serve', '--model', {str(checkpoint)!r}, *{ports}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "")
    failed = json.loads(done.stdout.splitlines()[-1])
    assert failed["event"] == "failed"
    assert "set TMPDIR to one that can be written" in failed["reason"]


def test_serve_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--model, OPTICNERVE_MODEL" in refusal(capsys, "serve")


def test_print_config_names_values_and_sources(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "c.toml").write_text("grace = 7")
    monkeypatch.setenv("OPTICNERVE_DRAIN_DELAY", "1")
    assert cli.main(["serve", "--model", "m", "--config", str(tmp_path / "c.toml"), "--print-config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "model = m  (from flag --model)" in lines
    assert "drain_delay = 1.0  (from env OPTICNERVE_DRAIN_DELAY)" in lines
    assert f"grace = 7.0  (from file {tmp_path}/c.toml)" in lines
    assert [line for line in lines if line.startswith("max_item_tokens = none  (default: ")]
    assert [line for line in lines if line.startswith("graphs = true  (default: ")]


# --- make-checkpoint


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_makes_a_checkpoint_that_check_takes(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / architecture
    assert cli.main(["make-checkpoint", "--arch", architecture, "--out", str(out), "--seed", "3"]) == 0
    assert "random weights" in capsys.readouterr().out
    assert cli.main(["check", "--model", str(out), "--no-graphs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["architecture"] == architecture


def test_a_seed_makes_the_same_weights(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        cli.main(["make-checkpoint", "--arch", "qwen2_5_vl", "--out", str(tmp_path / name), "--seed", seed])
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_only_an_empty_directory_is_written_to(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def refused(out: Path) -> str:
        return refusal(capsys, "make-checkpoint", "--arch", "qwen3_vl", "--out", str(out))

    (tmp_path / "file").write_text("mine")
    assert "is not empty: name a directory" in refused(tmp_path)
    assert "cannot write --out" in refused(tmp_path / "file")
    assert "cannot write --out" in refused(tmp_path / "file" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert cli.main(["make-checkpoint", "--arch", "qwen3_vl", "--out", str(tmp_path / "new" / "model")]) == 0
    modes = {(path.stat().st_mode & 0o777) for path in (tmp_path / "new" / "model").iterdir()}
    assert modes == {0o666 & ~UMASK}


@pytest.mark.parametrize("command", ["serve", "check", "make-checkpoint"])
def test_the_client_alone_is_not_enough(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "av", None)
    arguments = ["--arch", "qwen3_vl", "--out", str(tmp_path)] if command == "make-checkpoint" else ["--model", "m"]
    assert "the server needs torch, av: pip install 'opticnerve[server]'" in refusal(capsys, command, *arguments)


def test_an_unknown_architecture_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "qwen3_vl" in refusal(capsys, "make-checkpoint", "--arch", "qwen9", "--out", str(tmp_path))


def test_it_is_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "opticnerve_server.cli", "serve", "--modle", "x"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "unknown argument --modle: did you mean --model?" in done.stderr
