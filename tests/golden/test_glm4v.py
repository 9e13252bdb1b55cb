"""GLM-4.1V, GLM-4.6V and GLM-4.5V against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from opticnerve_server.models.table import interpolation
from oracles import Media, load_model, media_for, oracle_rows, save_model
from towers import assert_close, assert_items_independent, assert_padding_harmless, load_tower, run_tower

# The widths of blocks, rows and merger all differ, so that none can stand for another.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm-4.1v": ("glm4v", {}),
    "glm-4.6v": ("glm46v", {"depth": 2, "hidden_size": 48, "num_heads": 3, "out_hidden_size": 40}),
    "glm-4.5v": ("glm4v_moe", {"depth": 2, "image_size": 126, "rms_norm_eps": 1e-4}),
    "biased": ("glm4v", {"depth": 2, "attention_bias": True, "image_size": 28}),
}
GRIDS = [(1, 2, 2), (1, 2, 34), (1, 4, 6), (3, 4, 6), (1, 18, 22), (1, 10, 2), (2, 10, 4), (1, 8, 8)]


def batch_of(grids: list[tuple[int, int, int]]) -> list[Media]:
    return [media_for("glm4v", *grid, seed=i, odd=i % 2 == 1) for i, grid in enumerate(grids)]


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, vision = CONFIGS[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    save_model(architecture, directory, seed=len(request.param), **vision)
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


@pytest.mark.parametrize(("size", "side"), [(1, 24), (2, 24), (24, 24), (25, 24), (7, 3), (400, 24), (5, 1), (3, 2)])
def test_interpolation_is_that_of_torch(size: int, side: int) -> None:
    table = torch.randn(1, 1, 1, side, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = F.interpolate(table, size=(1, size), mode="bicubic", align_corners=False)[0, 0, 0]
    found = interpolation(size, side)
    values = (table[0, 0, 0].numpy()[found["tap"]] * found["weight"]).sum(1)
    np.testing.assert_allclose(values, expected.numpy(), rtol=0, atol=1e-6)
