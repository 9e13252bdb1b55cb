"""Servers that several files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oracles import save_model
from running_server import Official, running


@pytest.fixture(scope="session", params=["qwen3_vl", "qwen2_5_vl"])
def official(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Official]:
    directory = tmp_path_factory.mktemp(request.param)
    save_model(request.param, directory / "model")
    with running(directory / "model", directory, "--token-budgets", "64,256") as server:
        yield Official(request.param, directory / "model", server)
