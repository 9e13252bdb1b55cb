"""Kimi-VL's tower by transformers: that of Kimi-K2.5, which is the same for stills, with three lines behind it.

Only names and the order of the numbers in a head differ from those of a published file, from which it is loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

PATCH = 14
TOWER, PROJECTOR = "vision_tower.", "multi_modal_projector."

NAMES = (
    ("encoder.blocks.", "layers."), ("norm1.", "norm2."), ("norm0.", "norm1."), ("wo.", "attn.proj."),
    ("mlp.fc1.", "mlp.fc2."), ("mlp.fc0.", "mlp.fc1."), ("encoder.final_layernorm.", "final_layernorm."),
    ("pos_emb.weight", "pos_emb.position_embeddings"),
)  # fmt: skip
"""Parts of names in a published file, and in transformers; in the order in which none meets another's result."""


def build(vision: dict[str, Any]) -> Any:
    """The tower of a published `vision_config`."""
    official = pytest.importorskip("transformers.models.kimi_k25.modeling_kimi_k25")
    config = official.Kimi_K25VisionConfig(
        hidden_size=vision["hidden_size"], num_attention_heads=vision["num_attention_heads"],
        num_hidden_layers=vision["num_hidden_layers"], intermediate_size=vision["intermediate_size"],
        pos_emb_height=vision["init_pos_emb_height"], pos_emb_width=vision["init_pos_emb_width"],
    )  # fmt: skip
    return official.Kimi_K25VisionModel(config).eval()


def load(directory: Path, dtype: torch.dtype) -> tuple[Any, dict[str, torch.Tensor]]:
    """The tower, and the projector's tensors, of a checkpoint in the published format."""
    vision = json.loads((directory / "config.json").read_text())["vision_config"]
    stored = {name: tensor.to(dtype) for name, tensor in load_file(directory / "model.safetensors").items()}
    weights = {}
    for name, tensor in stored.items():
        if not name.startswith(TOWER):
            continue
        own = name.removeprefix(TOWER)
        for old, new in NAMES:
            own = own.replace(old, new)
        if ".wqkv." not in own:
            weights[own] = tensor
            continue
        q, k, v = tensor.chunk(3)
        turned = (halves(q, vision["num_attention_heads"]), halves(k, vision["num_attention_heads"]), v)
        weights |= {own.replace(".wqkv.", f".attn.{part}_proj."): x for part, x in zip("qkv", turned, strict=True)}
    tower = build(vision)
    tower.load_state_dict(weights)
    for parameter in tower.parameters():  # not `.to(dtype)`, which would round the rotary frequencies too
        parameter.data = parameter.data.to(dtype)
    return tower, {name.removeprefix(PROJECTOR): x for name, x in stored.items() if name.startswith(PROJECTOR)}


def halves(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a projection whose neighbours in a head turn against each other, in the order where its halves do."""
    return x.view(heads, -1, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def pixel_values(image: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Patches float32 [rows x columns, 3, 14, 14] in raster order of an image of whole tokens."""
    values = (torch.from_numpy(image).permute(2, 0, 1).float() / 255 - 0.5) / 0.5
    return F.unfold(values[None], PATCH, stride=PATCH)[0].T.reshape(-1, 3, PATCH, PATCH)


@torch.inference_mode()
def rows_of(directory: Path, patches: torch.Tensor, grid_hws: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [tokens, width] of the patches of images behind each other, whose rows and columns are int64 [images, 2]."""
    tower, p = load(directory, dtype)
    merged = tower(patches.to(dtype), grid_thw=F.pad(grid_hws, (1, 0), value=1)).pooler_output
    normed = F.layer_norm(merged, merged.shape[-1:], p["pre_norm.weight"], p["pre_norm.bias"], 1e-5).flatten(1)
    inner = F.gelu(F.linear(normed, p["linear_1.weight"], p["linear_1.bias"]))
    return F.linear(inner, p["linear_2.weight"], p["linear_2.bias"])
