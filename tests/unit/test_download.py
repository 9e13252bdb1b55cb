"""`download` takes of a repository what a server reads, from a hub of its own on loopback."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from opticnerve_server import cli
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.weights import INDEX

REPOSITORY, COMMIT = "org/model", "c" * 40
TOWER, BOTH, LANGUAGE = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))


class Hub(ThreadingHTTPServer):
    """The three answers that a download asks a hub for; `asked` are the files whose bytes were sent."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.asked = files, list[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        file = path.removeprefix(f"/{REPOSITORY}/resolve/{COMMIT}/")
        api = f"/api/models/{REPOSITORY}"
        if path == f"{api}/revision/{COMMIT}":
            listing = {"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.server.files]}
            content = json.dumps(listing).encode()
        elif path == f"{api}/tree/{COMMIT}":
            entries = self.server.files.items()
            tree = [{"type": "file", "path": name, "size": len(data), "oid": _digest(data)} for name, data in entries]
            content = json.dumps(tree).encode()
        elif file in self.server.files:
            content = self.server.files[file]
            if body:
                self.server.asked.append(file)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{_digest(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Not on the terminal."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A repository of three shards: of the tower, of it and the language model, and of the language model alone."""
    source = tmp_path / "source"
    write_checkpoint("qwen3_vl", source, 0)
    whole = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(whole)
    half = len(names) // 2
    words = {f"language_model.layers.{i}.weight": torch.full((2, 2), float(i)) for i in range(4)}
    shards = {
        TOWER: {name: whole[name] for name in names[:half]},
        BOTH: {name: whole[name] for name in names[half:]} | {"lm_head.weight": torch.ones(2, 2)},
        LANGUAGE: words,
    }
    for file, tensors in shards.items():
        save_file(tensors, source / file)
    index = {"weight_map": {name: file for file, tensors in shards.items() for name in tensors}}
    (source / INDEX).write_text(json.dumps(index))
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    server = Hub({**files, "README.md": b"read me", "original/weights.safetensors": b"twice"})
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    files_url = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files_url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", True)
    yield server
    server.shutdown()
    server.server_close()


def run(out: Path, repository: str = REPOSITORY) -> int:
    return cli.main(["download", "--repository", repository, "--revision", COMMIT, "--out", str(out)])


def test_only_the_towers_shards_are_fetched_and_a_server_can_read_them(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "models/model"
    assert run(out) == 0
    assert set(hub.asked) >= {"config.json", "preprocessor_config.json", INDEX, TOWER, BOTH}
    assert not {LANGUAGE, "README.md", "original/weights.safetensors"} & set(hub.asked)
    assert f"weights {TOWER}, {BOTH}" in capsys.readouterr().out
    assert cli.main(["check", "--model", str(out), "--device", "cpu"]) == 0

    hub.asked.clear()
    assert run(out) == 0, "a pod that starts again fetches nothing again"
    assert hub.asked == []


def test_without_an_index_every_file_of_weights_is_fetched(hub: Hub, tmp_path: Path) -> None:
    del hub.files[INDEX]
    assert run(tmp_path / "out") == 0
    assert {TOWER, BOTH, LANGUAGE} <= set(hub.asked)
    assert "original/weights.safetensors" not in hub.asked


def test_weights_of_a_model_that_is_not_supported_are_not_fetched(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.files["config.json"] = json.dumps({"architectures": ["LlamaForCausalLM"]}).encode()
    assert run(tmp_path / "out") == cli.EXIT_CONFIG
    assert "unsupported architecture" in capsys.readouterr().err
    assert not [file for file in hub.asked if file.endswith(".safetensors")]


def test_a_repository_that_is_not_there_is_named(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "out", "org/other") == cli.EXIT_CONFIG
    assert f"cannot download org/other at {COMMIT}" in capsys.readouterr().err
