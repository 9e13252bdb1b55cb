"""Llama 4, tower, adapter and projector, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.registry import ModelError
from opticnerve_server.types import Layout
from oracles import Media, llama4_adapter_rows, llama4_pixels, load_model, oracle_rows, save_model, tiled_media
from towers import assert_close, assert_items_independent, assert_padding_harmless, load_tower, run_tower

CONFIGS: dict[str, dict[str, Any]] = {
    "small": {},
    "other": {
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "text_hidden": 36,
        "rope_parameters": {"rope_theta": 50.0, "rope_type": "default"},
    },
}
SIZES = [(56, 56), (30, 300), (300, 100), (1, 1), (200, 150)]


def batch_of(tower: Any, sizes: list[tuple[int, int]]) -> list[Media]:
    return [tiled_media(tower.planner, *size, seed=i) for i, size in enumerate(sizes)]


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_model("llama4", directory, seed=len(request.param), **CONFIGS[request.param])
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_transformers(checkpoint: Path, dtype: str) -> None:
    model, tower = load_model(checkpoint, getattr(torch, dtype)), load_tower(checkpoint, dtype)
    batch = batch_of(tower, SIZES)
    assert tower.planner.layout == Layout(model.config.text_config.hidden_size, 0)
    assert_close(run_tower(tower, batch), oracle_rows(model, checkpoint, batch), tower)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_before_the_projector_equal_transformers(checkpoint: Path, dtype: str) -> None:
    model, tower = load_model(checkpoint, getattr(torch, dtype)), load_tower(checkpoint, dtype, projector=False)
    batch = batch_of(tower, SIZES)
    assert tower.planner.layout == Layout(20, 0, projector_applied=False)
    assert_close(run_tower(tower, batch), llama4_adapter_rows(model, batch), tower)


@torch.inference_mode()
def test_the_official_decoder_takes_the_rows_before_the_projector(checkpoint: Path) -> None:
    """Its logits are those from pixels."""
    model, tower = load_model(checkpoint), load_tower(checkpoint, projector=False)
    # transformers 5.24 looks for the tower's outputs among the language model's, where none has them.
    model.language_model.register_forward_hook(lambda module, inputs, outputs: setattr(outputs, "image_outputs", None))
    batch = batch_of(tower, [(300, 100), (56, 56)])
    tokens = sum(media.plan.tokens for media in batch)
    ids = torch.tensor([[1, 5, *[model.config.image_token_id] * tokens, 7, 9]])
    outputs = {"image": BaseModelOutputWithPooling(last_hidden_state=run_tower(tower, batch))}
    found, expected, other = (
        model(input_ids=ids, **media).logits
        for media in (
            {"mm_encoder_outputs": outputs},
            {"pixel_values": llama4_pixels(batch).float()},
            {"pixel_values": llama4_pixels(batch[::-1]).float()},
        )
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, other, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_item_does_not_depend_on_its_batch(checkpoint: Path, dtype: str) -> None:
    tower = load_tower(checkpoint, dtype)
    assert_items_independent(tower, batch_of(tower, SIZES))


def test_padding_changes_nothing(checkpoint: Path) -> None:
    tower = load_tower(checkpoint)
    batch = batch_of(tower, SIZES[1:3])
    assert_padding_harmless(tower, batch, oracle_rows(load_model(checkpoint), checkpoint, batch))


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("pixel_shuffle_ratio", 0.4, "pixel_shuffle_ratio is 0.4"),
        ("intermediate_size", 100, "intermediate_size is 100, the patches of a token are 384 wide"),
        ("vision_output_dim", 81, r"projector_input_dim, .* must be equal"),
        ("hidden_act", "silu", "hidden_act is 'silu'"),
        ("image_size", 70, "image_size is 70, must be a multiple of the 28 pixels of a token"),
        ("num_attention_heads", 16, "must be a multiple of 4"),
    ],
)
def test_configurations_that_are_refused_by_name(key: str, value: object, match: str, tmp_path: Path) -> None:
    write_checkpoint("llama4", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=match):
        load_tower(tmp_path)
