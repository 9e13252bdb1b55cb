"""Gemma 4, tower, pooling and projection, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from oracles import Media, load_model, media_for, oracle_rows, save_model
from towers import assert_close, assert_items_independent, assert_padding_harmless, load_tower, run_tower

# Published towers are either clipped or standardised. Heads need not add up to the width.
CONFIGS: dict[str, dict[str, Any]] = {
    "clipped": {"use_clipped_linears": True},
    "standardised": {"standardize": True, "text_hidden": 40},
    "both": {"use_clipped_linears": True, "standardize": True, "head_dim": 8, "rms_norm_eps": 1e-2},
}
CELLS = [(1, 1, 1), (1, 1, 17), (1, 2, 3), (3, 2, 3), (1, 7, 9), (1, 5, 1), (2, 4, 2), (1, 6, 6)]


def batch_of(cells: list[tuple[int, int, int]]) -> list[Media]:
    """Stills and videos of so many frames, rows and columns of pooled cells."""
    return [media_for("gemma4", t, 3 * rows, 3 * columns, seed=i) for i, (t, rows, columns) in enumerate(cells)]


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_model("gemma4", directory, seed=len(request.param), **CONFIGS[request.param])
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_transformers(checkpoint: Path, dtype: str) -> None:
    model, tower, batch = load_model(checkpoint, getattr(torch, dtype)), load_tower(checkpoint, dtype), batch_of(CELLS)
    assert_close(run_tower(tower, batch), oracle_rows(model, checkpoint, batch), tower)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_item_does_not_depend_on_its_batch(checkpoint: Path, dtype: str) -> None:
    assert_items_independent(load_tower(checkpoint, dtype), batch_of(CELLS))


def test_padding_changes_nothing(checkpoint: Path) -> None:
    tower, batch = load_tower(checkpoint), batch_of(CELLS[2:5])
    assert_padding_harmless(tower, batch, oracle_rows(load_model(checkpoint), checkpoint, batch))
