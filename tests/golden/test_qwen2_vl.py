"""Qwen2-VL against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from oracles import Media, load_model, media_for, oracle_rows, save_model
from towers import assert_close, assert_items_independent, assert_padding_harmless, load_tower, run_tower

CONFIGS: dict[str, dict[str, Any]] = {
    "published-shape": {"mlp_ratio": 4},
    "narrow": {"depth": 2, "embed_dim": 48, "num_heads": 3, "hidden_size": 40, "mlp_ratio": 1},
}
GRIDS = [(1, 2, 2), (1, 2, 34), (1, 4, 6), (3, 4, 6), (1, 18, 22), (1, 10, 2), (2, 10, 4), (1, 16, 16)]


def batch_of(grids: list[tuple[int, int, int]]) -> list[Media]:
    return [media_for("qwen2_vl", *grid, seed=i, odd=i % 2 == 1) for i, grid in enumerate(grids)]


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_model("qwen2_vl", directory, seed=len(request.param), **CONFIGS[request.param])
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_transformers(checkpoint: Path, dtype: str) -> None:
    model, tower, batch = load_model(checkpoint, getattr(torch, dtype)), load_tower(checkpoint, dtype), batch_of(GRIDS)
    assert_close(run_tower(tower, batch), oracle_rows(model, checkpoint, batch), tower)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_item_does_not_depend_on_its_batch(checkpoint: Path, dtype: str) -> None:
    assert_items_independent(load_tower(checkpoint, dtype), batch_of(GRIDS))


def test_padding_changes_nothing(checkpoint: Path) -> None:
    tower, batch = load_tower(checkpoint), batch_of(GRIDS[2:5])
    assert_padding_harmless(tower, batch, oracle_rows(load_model(checkpoint), checkpoint, batch))
