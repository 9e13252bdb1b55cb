"""InternVL in both formats, tower, pixel shuffle and projector, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from opticnerve_server.models.base import ImageItem
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.registry import ModelError
from oracles import Media, load_model, oracle_rows, save_model, tiled_media
from towers import assert_close, assert_items_independent, assert_padding_harmless, load_tower, run_tower

# Published towers are the first two: of 300 million parameters, and of 6 billion.
CONFIGS: dict[str, dict[str, Any]] = {
    "small": {"norm_type": "layer_norm", "attention_bias": True, "use_qk_norm": False},
    "large": {"norm_type": "rms_norm", "attention_bias": False, "use_qk_norm": True, "text_hidden": 40},
    "earlier": {"norm_type": "layer_norm", "attention_bias": True, "layer_norm_eps": 0.1, "layer": -2},
}
SIZES = [(56, 56), (30, 300), (300, 100), (1, 1), (200, 150)]


def batch_of(tower: Any, sizes: list[tuple[int, int]]) -> list[Media]:
    return [tiled_media(tower.planner, *size, seed=i) for i, size in enumerate(sizes)]


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_model("internvl", directory, seed=len(request.param), **CONFIGS[request.param])
    return directory


def write_authors_format(checkpoint: Path, directory: Path) -> None:
    """The same model as InternVLChatModel saves it: other names, q, k and v as one, settings in config.json."""
    weights = {
        name.removeprefix("model."): tensor for name, tensor in load_file(checkpoint / "model.safetensors").items()
    }
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if name.startswith("vision_tower."):
            fused = ".qkv."
            if ".k_proj." in name or ".v_proj." in name:
                continue
            if ".q_proj." in name:
                tensor = torch.cat([weights[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"])
            for old, new in (
                ("vision_tower.", "vision_model."), ("encoder.layer.", "encoder.layers."), (".q_proj.", fused),
                (".attention.", ".attn."), ("projection_layer", "proj"), ("layernorm_before", "norm1"),
                ("layernorm_after", "norm2"), ("lambda_", "ls"), ("cls_token", "class_embedding"),
                ("patch_embeddings.projection", "patch_embedding"), ("position_embeddings", "position_embedding"),
            ):  # fmt: skip
                name = name.replace(old, new)
        for old, new in (("layer_norm", "0"), ("linear_1", "1"), ("linear_2", "3")):
            name = name.replace(f"multi_modal_projector.{old}", f"mlp1.{new}")
        stored[name] = tensor.contiguous()
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    vision = config["vision_config"]
    for key in ("image_size", "patch_size"):
        vision[key] = vision[key][0]
    vision |= {"qkv_bias": vision.pop("attention_bias"), "qk_normalization": vision.pop("use_qk_norm")}
    authors = {
        "architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "vision_config": vision,
        "llm_config": config["text_config"], "select_layer": config["vision_feature_layer"], "ps_version": "v2",
        "downsample_ratio": 0.5, "force_image_size": 56, "dynamic_image_size": True, "use_thumbnail": True,
        "max_dynamic_patch": 12,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(authors))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_transformers(checkpoint: Path, dtype: str) -> None:
    model, tower = load_model(checkpoint, getattr(torch, dtype)), load_tower(checkpoint, dtype)
    batch = batch_of(tower, SIZES)
    assert_close(run_tower(tower, batch), oracle_rows(model, checkpoint, batch), tower)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_formats_give_the_same_rows(checkpoint: Path, dtype: str, tmp_path: Path) -> None:
    write_authors_format(checkpoint, tmp_path)
    tower, authors = load_tower(checkpoint, dtype), load_tower(tmp_path, dtype)
    batch = batch_of(tower, SIZES)
    assert authors.planner.architecture == "internvl_chat"
    sizes = [ImageItem(*size) for size in SIZES]
    assert [authors.planner.plan(item) for item in sizes] == [tower.planner.plan(item) for item in sizes]
    assert torch.equal(run_tower(authors, batch), run_tower(tower, batch))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_item_does_not_depend_on_its_batch(checkpoint: Path, dtype: str) -> None:
    tower = load_tower(checkpoint, dtype)
    assert_items_independent(tower, batch_of(tower, SIZES))


def test_padding_changes_nothing(checkpoint: Path) -> None:
    tower = load_tower(checkpoint)
    batch = batch_of(tower, SIZES[1:3])
    assert_padding_harmless(tower, batch, oracle_rows(load_model(checkpoint), checkpoint, batch))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_both_prefixes_of_transformers(checkpoint: Path, prefix: str, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(checkpoint / "model.safetensors")
    stored = {prefix + name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tower = load_tower(checkpoint)
    batch = batch_of(tower, SIZES[:2])
    assert torch.equal(run_tower(load_tower(tmp_path), batch), run_tower(tower, batch))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ps_version", "v1"),
        ("ps_version", None),  # which means v1
        ("select_layer", 0),
        ("select_layer", -4),
        ("downsample_ratio", 0.4),
        ("force_image_size", 448),
        ("vision_config.norm_type", "batch_norm"),
        ("vision_config.hidden_act", "silu"),
        ("vision_config.image_size", [56, 112]),
        ("vision_config.image_size", 70),
        ("dynamic_image_size", 1),
        ("max_dynamic_patch", 0),
    ],
)
def test_settings_that_are_refused_by_name(key: str, value: object, tmp_path: Path) -> None:
    write_checkpoint("internvl_chat", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    section, _, name = key.rpartition(".")
    (config[section] if section else config)[name] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"{name} is "):
        load_tower(tmp_path)
