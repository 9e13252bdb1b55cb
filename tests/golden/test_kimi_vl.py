"""Kimi-VL against the tower of Kimi-K2.5 in transformers, which is the same for stills, with three lines behind it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel

from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.presets import PROCESSORS
from opticnerve_server.models.registry import ModelError
from oracles import Media, media_for, randomise
from towers import assert_close, assert_items_independent, assert_padding_harmless, load_tower, run_tower

CONFIGS: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 48, "heads": 4, "layers": 3, "inner": 80, "table": 8, "out": 40},
    "other": {"hidden_size": 64, "heads": 2, "layers": 2, "inner": 100, "table": 13, "out": 24},
}
GRIDS = [(1, 2, 2), (1, 2, 34), (1, 4, 6), (1, 18, 22), (1, 10, 2), (1, 8, 8)]


def batch_of(grids: list[tuple[int, int, int]]) -> list[Media]:
    return [media_for("kimi_vl", *grid, seed=i) for i, grid in enumerate(grids)]


def official(config: dict[str, int]) -> Any:
    vision = Kimi_K25VisionConfig(
        hidden_size=config["hidden_size"], num_attention_heads=config["heads"], num_hidden_layers=config["layers"],
        intermediate_size=config["inner"], pos_emb_height=config["table"], pos_emb_width=config["table"],
    )  # fmt: skip
    return Kimi_K25VisionModel(vision).eval()


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The official tower with random weights in oracle.safetensors, and as published files have it beside that."""
    directory, config = tmp_path_factory.mktemp(request.param), CONFIGS[request.param]
    model = official(config)
    randomise(model, seed=len(request.param))
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            q, k, v = (weights[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv")
            tensor = torch.cat([neighbours(q, config["heads"]), neighbours(k, config["heads"]), v])
        stored[f"vision_tower.{published(name)}"] = tensor
    width, generator = 4 * config["hidden_size"], torch.Generator().manual_seed(1)
    for name, shape in (("linear_1", (width, width)), ("linear_2", (config["out"], width))):
        stored[f"multi_modal_projector.{name}.weight"] = torch.randn(shape, generator=generator) / math.sqrt(width)
        stored[f"multi_modal_projector.{name}.bias"] = torch.randn(shape[0], generator=generator) / 5
    stored["multi_modal_projector.pre_norm.weight"] = 1 + torch.randn(width // 4, generator=generator) / 5
    stored["multi_modal_projector.pre_norm.bias"] = torch.randn(width // 4, generator=generator) / 5
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "oracle").mkdir()
    save_file(weights, directory / "oracle" / "tower.safetensors")
    vision = {
        "hidden_size": config["hidden_size"], "num_attention_heads": config["heads"],
        "num_hidden_layers": config["layers"], "intermediate_size": config["inner"],
        "init_pos_emb_height": config["table"], "init_pos_emb_width": config["table"],
    }  # fmt: skip
    text = {"hidden_size": config["out"]}
    files = {
        "config.json": {"model_type": "kimi_vl", "vision_config": vision, "text_config": text},
        "preprocessor_config.json": PROCESSORS["kimi_vl"],
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def neighbours(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a projection whose halves of a head turn against each other, in the order where neighbours do."""
    return x.view(heads, 2, -1, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def published(name: str) -> str:
    for old, new in (
        ("layers.", "encoder.blocks."), ("norm1.", "norm0."), ("norm2.", "norm1."), ("attn.q_proj.", "wqkv."),
        ("attn.proj.", "wo."), ("mlp.fc1.", "mlp.fc0."), ("mlp.fc2.", "mlp.fc1."),
        ("final_layernorm.", "encoder.final_layernorm."), ("pos_emb.position_embeddings", "pos_emb.weight"),
    ):  # fmt: skip
        name = name.replace(old, new)
    return name


@torch.inference_mode()
def expected_rows(checkpoint: Path, batch: list[Media], dtype: torch.dtype) -> torch.Tensor:
    config = json.loads((checkpoint / "config.json").read_text())["vision_config"]
    tower = official(
        {
            "hidden_size": config["hidden_size"], "heads": config["num_attention_heads"],
            "layers": config["num_hidden_layers"], "inner": config["intermediate_size"],
            "table": config["init_pos_emb_height"],
        }
    )  # fmt: skip
    tower.load_state_dict({k: v.to(dtype) for k, v in load_file(checkpoint / "oracle" / "tower.safetensors").items()})
    for parameter in tower.parameters():
        parameter.data = parameter.data.to(dtype)
    patches = []
    for media in batch:
        values = (torch.from_numpy(media.frames[0]).permute(2, 0, 1).float() / 255 - 0.5) / 0.5
        patches.append(F.unfold(values[None], 14, stride=14)[0].T.reshape(-1, 3, 14, 14))
    grid = torch.tensor([media.plan.grid for media in batch])
    merged = tower(torch.cat(patches).to(dtype), grid_thw=grid).pooler_output
    stored = load_file(checkpoint / "model.safetensors")
    p = {k.removeprefix("multi_modal_projector."): v.to(dtype) for k, v in stored.items() if k.startswith("multi")}
    normed = F.layer_norm(merged, merged.shape[-1:], p["pre_norm.weight"], p["pre_norm.bias"], 1e-5).flatten(1)
    inner = F.gelu(F.linear(normed, p["linear_1.weight"], p["linear_1.bias"]))
    return F.linear(inner, p["linear_2.weight"], p["linear_2.bias"])


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
