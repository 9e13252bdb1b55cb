"""Servers that several files share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from opticnerve_server.models.presets import VIDEO_PROCESSORS
from oracles import save_model
from running_server import Official, running
from sglang_wheel import RELEASE, LanguageServer, receiver_of

VIDEO: dict[str, dict[str, Any]] = {
    "qwen3_vl": VIDEO_PROCESSORS["qwen3_vl"],
    "qwen2_5_vl": {
        "video_processor_type": "Qwen2VLVideoProcessor",  # every frame, each of 4 to 100 tokens
        "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 100 * 28 * 28},
    },
}
"""video_preprocessor_config.json"""


@pytest.fixture(scope="session", params=["qwen3_vl", "qwen2_5_vl"])
def official(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Official]:
    directory = tmp_path_factory.mktemp(request.param)
    save_model(request.param, directory / "model")
    (directory / "model" / "video_preprocessor_config.json").write_text(json.dumps(VIDEO[request.param]))
    front = ("--sglang-listen", "127.0.0.1:0", "--sglang-version", RELEASE)
    with running(directory / "model", directory, "--token-budgets", "64,256", *front) as server:
        yield Official(request.param, directory / "model", server)


@pytest.fixture(scope="module")
def sglang_receiver() -> Iterator[Any]:
    with receiver_of(RELEASE) as module:
        yield module


@pytest.fixture
def sglang(sglang_receiver: Any) -> Iterator[LanguageServer]:
    with closing(LanguageServer(sglang_receiver)) as server:
        yield server
