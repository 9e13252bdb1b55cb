"""Towers on CUDA against transformers on the CPU, and captured against themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opticnerve_server.models.base import PIXELS
from opticnerve_server.types import Capacity
from oracles import Media, load_model, media_for, oracle_rows, save_model
from tiny_models import TINY
from towers import PATH, assert_close, exact_capacity, load_tower, poison, run_tower

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ARCHITECTURES = ("qwen3_vl", "qwen2_5_vl", "qwen2_vl", "glm4v", "ernie4_5_vl_moe", "gemma4")
TOKENS = [(1, 2, 3), (1, 5, 1), (1, 1, 17), (1, 8, 8), (4, 2, 3), (1, 9, 11), (1, 1, 1)]
"""Groups, and rows and columns of tokens."""


def batch_of(architecture: str, tokens: list[tuple[int, int, int]]) -> list[Media]:
    side = TINY[architecture].merge
    return [media_for(architecture, t, h * side, w * side, seed=i) for i, (t, h, w) in enumerate(tokens)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_transformers(architecture: str, dtype: str, tmp_path: Path) -> None:
    save_model(architecture, tmp_path)
    batch, tower = batch_of(architecture, TOKENS), load_tower(tmp_path, dtype, "cuda")
    expected = oracle_rows(load_model(tmp_path, getattr(torch, dtype)), tmp_path, batch)
    assert_close(run_tower(tower, batch), expected, tower)
    exact = exact_capacity(batch)
    padded = Capacity(exact.units + 77, exact.items, exact.segments + 20, exact.longest + 50)
    assert_close(run_tower(tower, batch, padded), expected, tower)


def stage(tower: Any, batch: list[Media], capacity: Capacity, static: dict[str, torch.Tensor]) -> None:
    arrays = poison(tower, capacity)
    tower.fill(PATH, [media.plan for media in batch], arrays)
    used = np.concatenate([media.frames.ravel() for media in batch])
    arrays[PIXELS][: used.size] = used
    for name, array in arrays.items():
        static[name].copy_(torch.from_numpy(array))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replay_is_bit_equal_to_forward(architecture: str, dtype: str, tmp_path: Path) -> None:
    save_model(architecture, tmp_path)
    tower = load_tower(tmp_path, dtype, "cuda")
    capacity = Capacity(units=256, items=8, segments=12, longest=256 * TINY[architecture].merge ** 2)
    batches = [batch_of(architecture, grids) for grids in (TOKENS[:2], TOKENS, [(1, 8, 16)], TOKENS[:1])]
    static = {
        name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device="cuda")
        for name, spec in tower.buffers(PATH, capacity).items()
    }
    with torch.inference_mode():
        tower.forward(PATH, static, capacity)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = tower.forward(PATH, static, capacity)
        for batch in batches:
            stage(tower, batch, capacity, static)
            graph.replay()
            assert torch.equal(out, tower.forward(PATH, static, capacity))
            assert out.isfinite().all()
