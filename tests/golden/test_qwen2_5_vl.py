"""Qwen2.5-VL against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracles import Media, load_model, oracle_rows, random_media, save_model
from towers import (
    PATH,
    assert_close,
    assert_items_independent,
    assert_padding_harmless,
    exact_capacity,
    load_tower,
    poison,
    run_tower,
)

CONFIGS: dict[str, dict[str, Any]] = {
    "published-window": {"window_size": 112, "fullatt_block_indexes": [1, 3]},
    "window-of-one-token": {"window_size": 28, "fullatt_block_indexes": [0], "hidden_size": 48, "depth": 2},
    "window-of-three": {"window_size": 84, "fullatt_block_indexes": [2], "hidden_size": 72, "num_heads": 3},
    "no-full-layer": {"window_size": 56, "fullatt_block_indexes": [], "depth": 2, "out_hidden_size": 40},
    "no-window-layer": {"window_size": 112, "fullatt_block_indexes": [0, 1], "depth": 2, "intermediate_size": 75},
}
# One partial window, strips, exact multiples of 8 patches, mixed ones, the smallest, and clips.
GRIDS = [(1, 4, 6), (1, 10, 2), (1, 2, 34), (1, 16, 16), (1, 8, 8), (1, 18, 22), (3, 4, 6), (1, 2, 2), (2, 10, 4)]


def batch_of(grids: list[tuple[int, int, int]]) -> list[Media]:
    return [random_media(*grid, patch=14, seed=i, odd=i % 2 == 0) for i, grid in enumerate(grids)]


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_model("qwen2_5_vl", directory, seed=len(request.param), **CONFIGS[request.param])
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_transformers(checkpoint: Path, dtype: str) -> None:
    model, tower, batch = load_model(checkpoint, getattr(torch, dtype)), load_tower(checkpoint, dtype), batch_of(GRIDS)
    assert_close(run_tower(tower, batch), oracle_rows(model, checkpoint, batch), tower)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_item_does_not_depend_on_its_batch(checkpoint: Path, dtype: str) -> None:
    assert_items_independent(load_tower(checkpoint, dtype), batch_of(GRIDS))


def test_padding_changes_nothing(checkpoint: Path) -> None:
    model, tower, batch = load_model(checkpoint), load_tower(checkpoint), batch_of(GRIDS[2:5])
    assert_padding_harmless(tower, batch, oracle_rows(model, checkpoint, batch))


def test_strips_have_as_many_windows_as_a_capacity_takes(checkpoint: Path) -> None:
    tower = load_tower(checkpoint)
    longest = 2 * (tower.window_side + 1)
    batch = batch_of([(1, 2, longest), (1, longest, 2)])
    buffers = poison(tower, exact_capacity(batch))
    tower.fill(PATH, [media.plan for media in batch], buffers)
    assert np.all(np.diff(buffers["cu_windows"]) > 0)
    assert buffers["cu_windows"][-1] == 2 * 2 * longest


@pytest.mark.parametrize("grid", [(1, 4100, 2), (1, 2, 4100)], ids=["tall", "wide"])
def test_strips_beyond_any_table_of_angles(grid: tuple[int, int, int], tmp_path: Path) -> None:
    save_model("qwen2_5_vl", tmp_path, depth=2, hidden_size=32, num_heads=2, fullatt_block_indexes=[1])
    batch = batch_of([grid])
    tower = load_tower(tmp_path)
    assert_close(run_tower(tower, batch), oracle_rows(load_model(tmp_path), tmp_path, batch), tower)
