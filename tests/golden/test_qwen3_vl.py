"""Qwen3-VL, Qwen3.5 and their MoE variants against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from oracles import Media, load_model, oracle_rows, random_media, save_model
from towers import assert_close, assert_items_independent, assert_padding_harmless, load_tower, run_tower

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "three-levels": ("qwen3_vl", {}),
    "moe": ("qwen3_vl_moe", {"hidden_size": 72, "num_heads": 3, "deepstack_visual_indexes": [1]}),
    "no-deepstack": ("qwen3_vl", {"depth": 2, "hidden_size": 48, "deepstack_visual_indexes": []}),
    "levels-out-of-order": ("qwen3_vl", {"deepstack_visual_indexes": [3, 0], "out_hidden_size": 40}),
    "qwen3.5": ("qwen3_5", {"hidden_size": 48}),
    "qwen3.5-moe": ("qwen3_5_moe", {"depth": 2, "num_position_embeddings": 81}),
    "large-table": ("qwen3_vl", {"depth": 3, "deepstack_visual_indexes": [2], "num_position_embeddings": 400}),
}
GRIDS = [(1, 2, 2), (1, 2, 34), (1, 4, 6), (3, 4, 6), (1, 18, 22), (1, 10, 2), (2, 10, 4), (1, 16, 16)]


def batch_of(grids: list[tuple[int, int, int]]) -> list[Media]:
    return [random_media(*grid, patch=16, seed=i, odd=i % 2 == 1) for i, grid in enumerate(grids)]


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, vision = CONFIGS[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    save_model(architecture, directory, seed=len(request.param), **vision)
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_transformers_at_every_level(checkpoint: Path, dtype: str) -> None:
    model, tower, batch = load_model(checkpoint, getattr(torch, dtype)), load_tower(checkpoint, dtype), batch_of(GRIDS)
    expected = oracle_rows(model, checkpoint, batch)
    assert_close(run_tower(tower, batch), expected, tower)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_item_does_not_depend_on_its_batch(checkpoint: Path, dtype: str) -> None:
    assert_items_independent(load_tower(checkpoint, dtype), batch_of(GRIDS))


def test_padding_changes_nothing(checkpoint: Path) -> None:
    model, tower, batch = load_model(checkpoint), load_tower(checkpoint), batch_of(GRIDS[2:5])
    assert_padding_harmless(tower, batch, oracle_rows(model, checkpoint, batch))


@pytest.mark.parametrize("grid", [(1, 4100, 2), (1, 2, 4100)], ids=["tall", "wide"])
def test_strips_beyond_any_table_of_angles(grid: tuple[int, int, int], tmp_path: Path) -> None:
    save_model("qwen3_vl", tmp_path, depth=2, hidden_size=32, num_heads=2, deepstack_visual_indexes=[1])
    batch = batch_of([grid])
    expected = oracle_rows(load_model(tmp_path), tmp_path, batch)
    tower = load_tower(tmp_path)
    assert_close(run_tower(tower, batch), expected, tower)


def test_two_images_differ(checkpoint: Path) -> None:
    tower = load_tower(checkpoint)
    one, other = (run_tower(tower, [random_media(1, 4, 6, patch=16, seed=seed)]) for seed in (1, 2))
    assert float((one - other).norm() / one.norm()) > 1e-2
