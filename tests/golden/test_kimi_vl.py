"""Kimi-VL against the tower of Kimi-K2.5 in transformers and three lines behind it (`kimi_oracle.py`)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import kimi_oracle
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.presets import PROCESSORS
from opticnerve_server.models.registry import ModelError
from oracles import Media, media_for
from towers import assert_close, assert_items_independent, assert_padding_harmless, load_tower, run_tower

CONFIGS: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 48, "heads": 4, "layers": 3, "inner": 80, "table": 8, "out": 40},
    "other": {"hidden_size": 64, "heads": 2, "layers": 2, "inner": 100, "table": 13, "out": 24},
}
GRIDS = [(1, 2, 2), (1, 2, 34), (1, 4, 6), (1, 18, 22), (1, 10, 2), (1, 8, 8)]


def batch_of(grids: list[tuple[int, int, int]]) -> list[Media]:
    return [media_for("kimi_vl", *grid, seed=i) for i, grid in enumerate(grids)]


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights as published files have them."""
    directory, config = tmp_path_factory.mktemp(request.param), CONFIGS[request.param]
    width, inner, out, side = config["hidden_size"], config["inner"], config["out"], config["table"]
    block = {
        "norm0": (width,), "norm1": (width,), "wqkv": (3 * width, width), "wo": (width, width),
        "mlp.fc0": (inner, width), "mlp.fc1": (width, inner),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj": (width, 3, 14, 14), "vision_tower.encoder.final_layernorm": (width,),
        "multi_modal_projector.pre_norm": (width,), "multi_modal_projector.linear_1": (4 * width, 4 * width),
        "multi_modal_projector.linear_2": (out, 4 * width),
        **{f"vision_tower.encoder.blocks.{i}.{k}": v for i in range(config["layers"]) for k, v in block.items()},
    }  # fmt: skip
    random, stored = torch.Generator().manual_seed(len(request.param)), {}
    for name, shape in shapes.items():
        weight = torch.randn(shape, generator=random)
        stored[f"{name}.weight"] = weight / math.sqrt(weight[0].numel()) if len(shape) > 1 else 1 + weight / 5
        stored[f"{name}.bias"] = torch.randn(shape[0], generator=random) / 5
    stored["vision_tower.patch_embed.pos_emb.weight"] = torch.randn(side, side, width, generator=random)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    vision = {
        "hidden_size": width, "num_attention_heads": config["heads"], "num_hidden_layers": config["layers"],
        "intermediate_size": inner, "init_pos_emb_height": side, "init_pos_emb_width": side,
    }  # fmt: skip
    files = {
        "config.json": {"model_type": "kimi_vl", "vision_config": vision, "text_config": {"hidden_size": out}},
        "preprocessor_config.json": PROCESSORS["kimi_vl"],
    }
    for file, content in files.items():
        (directory / file).write_text(json.dumps(content))
    return directory


def expected_rows(checkpoint: Path, batch: list[Media], dtype: torch.dtype) -> torch.Tensor:
    patches = torch.cat([kimi_oracle.pixel_values(media.frames[0]) for media in batch])
    return kimi_oracle.rows_of(checkpoint, patches, torch.tensor([media.plan.grid[1:] for media in batch]), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_transformers(checkpoint: Path, dtype: str) -> None:
    tower, batch = load_tower(checkpoint, dtype), batch_of(GRIDS)
    assert_close(run_tower(tower, batch), expected_rows(checkpoint, batch, getattr(torch, dtype)), tower)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_item_does_not_depend_on_its_batch(checkpoint: Path, dtype: str) -> None:
    assert_items_independent(load_tower(checkpoint, dtype), batch_of(GRIDS))


def test_padding_changes_nothing(checkpoint: Path) -> None:
    batch = batch_of(GRIDS[1:4])
    assert_padding_harmless(load_tower(checkpoint), batch, expected_rows(checkpoint, batch, torch.float32))


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("merge_kernel_size", [2, 1], "merge_kernel_size is"),
        ("init_pos_emb_width", 8, "init_pos_emb_width is 8"),
        ("hidden_act", "silu", "hidden_act is"),
    ],
)
def test_configurations_that_are_refused_by_name(key: str, value: object, match: str, tmp_path: Path) -> None:
    write_checkpoint("kimi_vl", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=match):
        load_tower(tmp_path)
