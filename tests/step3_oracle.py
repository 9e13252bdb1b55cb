"""The Step3-VL family by its published code's steps: views by Pillow and torch, towers by transformers or in float64.

Sizes are those of the small checkpoints: whole views of 112 pixels, crops of 84, no side longer than 504.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file

from opticnerve_server.models.base import ImageItem
from opticnerve_server.models.processor import CLIP_MEAN, CLIP_STD

WHOLE, CROP, LARGEST = 112, 84, 504
SETTINGS = {"size": {"height": WHOLE, "width": WHOLE}, "patch_size": CROP, "max_image_size": LARGEST}
VISION = {"width": 64, "layers": 3, "heads": 4, "mlp_ratio": 2.0, "image_size": WHOLE, "patch_size": 14}
RENAMED = (
    ("embeddings.patch_embedding.", "conv1."), ("embeddings.position_embedding.weight", "positional_embedding"),
    ("pre_layernorm.", "ln_pre."), ("layers.", "transformer.resblocks."), ("layernorm_before.", "ln_1."),
    ("layernorm_after.", "ln_2."), ("lambda_1", "ls_1.gamma"), ("lambda_2", "ls_2.gamma"), ("mlp.fc1.", "mlp.c_fc."),
    ("mlp.fc2.", "mlp.c_proj."), ("downsampler", "vit_downsampler"),
)  # fmt: skip
"""Parts of names in transformers' Perception Encoder, and in published files."""


def perception(vision: dict[str, Any]) -> Any:
    """transformers' tower of a published `vision_config`."""
    sizes = {key: vision[key] for key in ("width", "layers", "heads", "mlp_ratio")}
    positions = (vision["image_size"] // 14) ** 2
    official = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
    config = official.Step3p7VisionConfig(**sizes, image_size=vision["image_size"], max_position_embeddings=positions)
    return official.Step3p7VisionModel(config).eval()


def published(model: Any, heads: int) -> dict[str, torch.Tensor]:
    """The weights of that tower as published files have them."""
    weights, stored = model.state_dict(), {}
    for name, tensor in weights.items():
        if ".q_proj." in name:
            q, k, v = (weights[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv")
            tensor = torch.cat([neighbours(q, heads), neighbours(k, heads), v])
        if ".k_proj." not in name and ".v_proj." not in name:
            stored[published_name(name)] = tensor.contiguous()
    return stored


def write_published(directory: Path, model: str, tower: Any, projector: torch.Tensor) -> None:
    """transformers' tower of VISION and its projector [hidden, 256] as a checkpoint of `model`, its class."""
    stored = {**published(tower, VISION["heads"]), "vit_large_projector.weight": projector.contiguous()}
    stored["model.embed_tokens.weight"] = torch.zeros(8, len(projector))
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": [model], "vision_config": VISION}
    config |= {
        "understand_projector_stride": 2,
        "projector_bias": False,
        "text_config": {"hidden_size": len(projector)},
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(SETTINGS))


def neighbours(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a projection whose halves of a head turn against each other, in the order where neighbours do."""
    return x.view(heads, 2, -1, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def halves(x: torch.Tensor, heads: int) -> torch.Tensor:
    """The way back."""
    return x.view(heads, -1, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def perception_features(directory: Path, views: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of each view by transformers, with the weights of a published file."""
    vision = json.loads((directory / "config.json").read_text())["vision_config"]
    stored = {name: tensor.to(dtype) for name, tensor in load_file(directory / "model.safetensors").items()}
    model, heads = perception(vision).to(dtype), vision["heads"]
    own = {}
    for name in model.state_dict():
        match = next((part for part in "qkv" if f".{part}_proj." in name), None)
        if match is not None:
            joined = published_name(name.replace(f".{match}_proj.", ".q_proj."))
            part = dict(zip("qkv", stored[joined].chunk(3), strict=True))[match]
            own[name] = part if match == "v" else halves(part, heads)
        else:
            own[name] = stored[published_name(name)]
    model.load_state_dict(own)
    return F.linear(model(views.to(dtype)).last_hidden_state, stored["vit_large_projector.weight"])


def published_name(name: str) -> str:
    """What the file calls a tensor of transformers' tower; q, k and v are one there, under the name of q."""
    kind, layer = name.rpartition(".")[2], name.partition(".self_attn.")[0].partition(".attn.")[0]
    if ".q_proj." in name:
        name = f"{layer}.attn.in_proj_{kind}"
    elif "attn." in name:
        name = f"{layer}.attn.out_proj.{kind}"
    for old, new in RENAMED:
        name = name.replace(old, new)
    return f"vision_model.{name}"


def step3_features(directory: Path, views: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The published forward, step by step, in float64 whatever `dtype`."""
    w = {name: tensor.double() for name, tensor in load_file(directory / "model.safetensors").items()}
    config = json.loads((directory / "config.json").read_text())["vision_config"]
    heads, width = config["num_attention_heads"], config["hidden_size"]
    p = "vision_model.embeddings."
    x = F.conv2d(views.double(), w[p + "patch_embedding.weight"], w[p + "patch_embedding.bias"], stride=14)
    side = x.shape[-1]
    x = x.flatten(2).transpose(1, 2)
    table = w[p + "position_embedding.weight"]
    grid = table[1:].T.reshape(1, width, WHOLE // 14, WHOLE // 14)
    if side != WHOLE // 14:
        grid = F.interpolate(grid.float(), (side, side), mode="bicubic", antialias=True, align_corners=False).double()
    first = (w[p + "class_embedding"] + table[:1]).expand(len(x), 1, width)
    x = torch.cat([first, first, first, first, x + grid[0].flatten(1).T], dim=1)
    for layer in range(config["num_hidden_layers"]):
        p = f"vision_model.transformer.layers.{layer}."
        q, k, v = (x @ w[p + "self_attn.qkv_proj.weight"].T + w[p + "self_attn.qkv_proj.bias"]).chunk(3, dim=-1)
        q, k, v = (y.view(*y.shape[:2], heads, -1).transpose(1, 2) for y in (q, k, v))
        attended = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-1) @ v
        attended = attended.transpose(1, 2).flatten(2)
        out = attended @ w[p + "self_attn.out_proj.weight"].T + w[p + "self_attn.out_proj.bias"]
        x = x + F.layer_norm(out, (width,), w[p + "layer_norm1.weight"], w[p + "layer_norm1.bias"], 1e-6)
        inner = x @ w[p + "mlp.fc1.weight"].T + w[p + "mlp.fc1.bias"]
        out = inner * torch.sigmoid(1.702 * inner) @ w[p + "mlp.fc2.weight"].T + w[p + "mlp.fc2.bias"]
        x = x + F.layer_norm(out, (width,), w[p + "layer_norm2.weight"], w[p + "layer_norm2.bias"], 1e-6)
    x = x[:, 4:].transpose(1, 2).reshape(len(x), width, side, side)
    x = F.conv2d(x, w["vit_downsampler.weight"], w["vit_downsampler.bias"], stride=2)
    x = F.conv2d(x, w["vit_downsampler2.weight"], w["vit_downsampler2.bias"], stride=2, padding=1)
    return x.flatten(2).transpose(1, 2) @ w["vit_large_projector.weight"].T + w.get("vit_large_projector.bias", 0)


def official_plan(
    width: int, height: int, whole: int, crop: int, largest: int, *, exact: bool = False
) -> tuple[Any, ...]:
    """The authors' rule, or transformers' `exact` one.

    Whether it is squared, both sizes (width, height), the window, crops across and down.
    """
    squared = min(width, height) < 32 and max(width / height, height / width) > 4
    if squared:
        width = height = max(width, height)
    if max(height, width) > largest:
        scale = largest / max(height, width)
        width, height = int(width * scale), int(height * scale)
    short, long = min(height, width), max(height, width)
    if short == 0:
        return (squared, None)
    if long <= whole:
        window = short if long / short > 1.5 else 0
    elif long / short > 4:
        window = min(short, crop)
    else:
        window = crop
    if not window:
        return squared, (width, height), (width, height), 0, 0, 0

    def snap(side: int) -> int:
        if side / window < 1:
            return side
        over = side % window > 0.2 * window if exact else side / window - side // window > 0.2
        return window * (int(side / window) + 1 if over else int(side / window))

    snapped = snap(width), snap(height)
    return squared, (width, height), snapped, window, max(1, snapped[0] // window), max(1, snapped[1] // window)


def official_views(pixels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole view and the crops, normalised, [n, 3, side, side], by Pillow and torch as the published code does."""
    height, width = pixels.shape[:2]
    squared, size, snapped, window, across, down = official_plan(width, height, WHOLE, CROP, LARGEST)
    image = Image.fromarray(pixels)
    if squared:
        square = Image.new("RGB", (max(image.size),) * 2)
        square.paste(image, (0, 0))
        image = square
    image = image.resize(size, Image.Resampling.BILINEAR)
    crops = []
    if window:
        cut = image.resize(snapped, Image.Resampling.BILINEAR)
        corners = [(column * window, row * window) for row in range(down) for column in range(across)]
        crops = [cut.crop((left, top, left + window, top + window)) for left, top in corners]

    def values(view: Image.Image, side: int) -> torch.Tensor:
        scaled = torch.from_numpy(np.array(view)).permute(2, 0, 1).float() / 255
        normed = (scaled - torch.tensor(CLIP_MEAN)[:, None, None]) / torch.tensor(CLIP_STD)[:, None, None]
        if view.size == (side, side):
            return normed
        return F.interpolate(normed[None], (side, side), mode="bilinear", antialias=True, align_corners=False)[0]

    local = torch.stack([values(crop, CROP) for crop in crops]) if crops else torch.zeros(0, 3, CROP, CROP)
    return values(image, WHOLE)[None], local


def fixed_point(views: torch.Tensor) -> torch.Tensor:
    """Normalised views with their levels rounded to 1/256."""
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (CLIP_MEAN, CLIP_STD))
    levels = ((views.double() * std + mean) * 255 * 256).round() / 256
    return ((levels / 255 - mean) / std).float()


@torch.inference_mode()
def rows_of(directory: Path, whole: torch.Tensor, crops: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows of one image, of its crops first."""
    step3 = "output_hidden_size" in json.loads((directory / "config.json").read_text())["vision_config"]
    features = step3_features if step3 else perception_features
    rows = [features(directory, crops, dtype).flatten(0, 1)] if len(crops) else []
    return torch.cat([*rows, features(directory, whole, dtype)[0]]).to(dtype)


def planned_views(planner: Any, pixels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The views that our planner makes, as the official ones are given."""
    plan = planner.plan(ImageItem(*pixels.shape[:2]))
    out = np.empty(plan.pixel_bytes, np.uint8)
    planner.fill_pixels(pixels, plan, out)
    levels = torch.from_numpy(out.view("<u2").astype(np.float64) / 256)
    end = WHOLE**2 * 3
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (CLIP_MEAN, CLIP_STD))
    whole, crops = (
        ((part.view(-1, side, side, 3).permute(0, 3, 1, 2) / 255 - mean) / std).float()
        for part, side in ((levels[:end], WHOLE), (levels[end:], CROP))
    )
    return whole, crops
