"""Gemma 3, tower, pooling and projection, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from opticnerve_server.models.registry import ModelError
from oracles import Media, load_model, oracle_rows, save_model, tiled_media
from towers import assert_close, assert_items_independent, assert_padding_harmless, load_tower, run_tower

CONFIGS: dict[str, dict[str, Any]] = {
    "small": {},
    "other": {
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "text_hidden": 40,
        "tokens": 16,
        "layer_norm_eps": 1e-3,
    },
}
SIZES = [(112, 112), (30, 300), (300, 30), (1, 1), (200, 150)]


def batch_of(tower: Any, sizes: list[tuple[int, int]]) -> list[Media]:
    return [tiled_media(tower.planner, *size, seed=i) for i, size in enumerate(sizes)]


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_model("gemma3", directory, seed=len(request.param), **CONFIGS[request.param])
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_transformers(checkpoint: Path, dtype: str) -> None:
    model, tower = load_model(checkpoint, getattr(torch, dtype)), load_tower(checkpoint, dtype)
    batch = batch_of(tower, SIZES)
    assert_close(run_tower(tower, batch), oracle_rows(model, checkpoint, batch), tower)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_item_does_not_depend_on_its_batch(checkpoint: Path, dtype: str) -> None:
    tower = load_tower(checkpoint, dtype)
    assert_items_independent(tower, batch_of(tower, SIZES))


def test_padding_changes_nothing(checkpoint: Path) -> None:
    tower = load_tower(checkpoint)
    batch = batch_of(tower, SIZES[1:3])
    assert_padding_harmless(tower, batch, oracle_rows(load_model(checkpoint), checkpoint, batch))


@pytest.mark.parametrize("tower_prefix", ["vision_tower.", "vision_tower.vision_model."])
@pytest.mark.parametrize("model_prefix", ["", "model."])
def test_every_family_of_prefixes(checkpoint: Path, model_prefix: str, tower_prefix: str, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        bare = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
        stored[model_prefix + bare.replace("vision_tower.", tower_prefix)] = tensor
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tower = load_tower(checkpoint)
    batch = batch_of(tower, SIZES[:2])
    assert torch.equal(run_tower(load_tower(tmp_path), batch), run_tower(tower, batch))


@pytest.mark.parametrize("tokens", [0, 5, 9, "4"])
def test_tokens_that_no_pooling_gives_are_refused(tokens: object, checkpoint: Path, tmp_path: Path) -> None:

    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "mm_tokens_per_image": tokens}))
    with pytest.raises(ModelError, match=r"mm_tokens_per_image is .* must be a square"):
        load_tower(tmp_path)
