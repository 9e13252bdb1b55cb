"""DeepSeek-OCR by transformers: the vision model of Unlimited-OCR, assembled as the model's own code does.

The weights are those of a published file, by their names there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from safetensors.torch import load_file

Pixels = npt.NDArray[np.uint8]

MOST = 6
"""Crops of one image."""


@dataclass(frozen=True)
class Views:
    """An image whole [side, side, 3], its crops [n, side, side, 3], and how many these are across and down."""

    whole: Pixels
    crops: Pixels
    across: int
    down: int


def build(vision: dict[str, Any]) -> Any:
    """The official model of a published `vision_config`."""
    own, clip = vision["width"]["sam_vit_b"], vision["width"]["clip-l-14-224"]
    sam = {
        "hidden_size": own["width"], "num_hidden_layers": own["layers"], "num_attention_heads": own["heads"],
        "mlp_dim": 4 * own["width"], "output_channels": 256, "global_attn_indexes": own["global_attn_indexes"],
        "downsample_channels": own["downsample_channels"], "image_size": vision["image_size"],
    }  # fmt: skip
    encoder = {
        "hidden_size": clip["width"], "intermediate_size": 4 * clip["width"], "num_hidden_layers": clip["layers"],
        "num_attention_heads": clip["heads"], "image_size": clip["image_size"], "patch_size": clip["patch_size"],
    }  # fmt: skip
    official = pytest.importorskip("transformers.models.unlimited_ocr.modeling_unlimited_ocr")
    config = official.UnlimitedOcrVisionConfig(sam_config=sam, encoder_config=encoder)
    return official.UnlimitedOcrVisionModel(config).eval()


def published(name: str) -> str:
    """What the file calls a tensor of the official model; q, k and v are one there, under the name of q."""
    for old, new in (
        ("sam_encoder.layers.", "sam_model.blocks."), ("sam_encoder.", "sam_model."), (".layer_norm1.", ".norm1."),
        (".layer_norm2.", ".norm2."), ("patch_embed.projection.", "patch_embed.proj."), ("neck.conv1.", "neck.0."),
        ("neck.norm1.", "neck.1."), ("neck.conv2.", "neck.2."), ("neck.norm2.", "neck.3."),
        ("sam_model.proj.conv1.", "sam_model.net_2."), ("sam_model.proj.conv2.", "sam_model.net_3."),
    ):  # fmt: skip
        name = name.replace(old, new) if name.startswith(("sam_encoder", "sam_model")) else name
    name = name.replace("projector.", "projector.layers.").replace(".q_proj.", ".qkv_proj.")
    return name.replace("vision_encoder.", "vision_model.").replace(".encoder.layers.", ".transformer.layers.")


def load(directory: Path, dtype: torch.dtype) -> tuple[Any, dict[str, torch.Tensor]]:
    """The official model with the weights of a file, and all tensors of the file by their names less "model."."""
    vision = json.loads((directory / "config.json").read_text())["vision_config"]
    file = load_file(directory / "model.safetensors")
    stored = {name.removeprefix("model."): tensor.to(dtype) for name, tensor in file.items()}
    model = build(vision).to(dtype)
    model.load_state_dict({name: _own(stored, name) for name in model.state_dict()})
    return model, stored


def _own(stored: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    for index, part in enumerate("qkv"):
        if f".{part}_proj." in name:
            return stored[published(name.replace(f".{part}_proj.", ".q_proj."))].chunk(3)[index]
    return stored[published(name)]


def grid_of(height: int, width: int, most: int, side: int) -> tuple[int, int]:
    """The rule of the model's code: columns and rows, (1, 1) for an image without crops."""
    if width <= side and height <= side:
        return 1, 1
    sides = range(1, most + 1)
    candidates = {(i, j) for i in sides for j in sides if 2 <= i * j <= most}
    found, nearest = (1, 1), float("inf")
    for i, j in sorted(candidates, key=lambda pair: pair[0] * pair[1]):
        off = abs(width / height - i / j)
        if off < nearest:
            nearest, found = off, (i, j)
        elif off == nearest and width * height > 0.5 * side * side * i * j:
            found = (i, j)
    return found


def views_of(pixels: Pixels, whole_side: int, crop_side: int) -> Views:
    """By Pillow, as in the model's code."""
    image = Image.fromarray(pixels)
    whole = np.asarray(ImageOps.pad(image, (whole_side, whole_side), color=(127, 127, 127)))
    across, down = grid_of(*pixels.shape[:2], MOST, crop_side)
    crops = []
    if (across, down) != (1, 1):
        resized = image.resize((crop_side * across, crop_side * down))
        for n in range(across * down):
            left, top = n % across * crop_side, n // across * crop_side
            crops.append(np.asarray(resized.crop((left, top, left + crop_side, top + crop_side))))
    return Views(whole, np.array(crops, np.uint8).reshape(-1, crop_side, crop_side, 3), across, down)


@torch.inference_mode()
def rows_of(directory: Path, images: Sequence[Views], dtype: torch.dtype) -> torch.Tensor:
    """Rows [tokens, width]: of each image the crops line by line, then the whole and a separator."""
    model, weights = load(directory, dtype)
    newline, separator = weights["image_newline"], weights["view_seperator"]

    def features(views: Pixels) -> torch.Tensor:
        values = ((torch.from_numpy(views.copy()).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5).to(dtype)
        seen = model(values).last_hidden_state
        return F.linear(seen, weights["projector.layers.weight"], weights["projector.layers.bias"])

    rows = []
    for image in images:
        if len(image.crops):
            local = features(image.crops)
            side = math.isqrt(local.shape[1])
            local = local.view(image.down, image.across, side, side, -1).permute(0, 2, 1, 3, 4)
            local = local.reshape(image.down * side, image.across * side, -1)
            rows.append(torch.cat([local, newline.expand(len(local), 1, -1)], dim=1).flatten(0, 1))
        seen = features(image.whole[None])[0]
        side = math.isqrt(len(seen))
        rows.append(torch.cat([seen.view(side, side, -1), newline.expand(side, 1, -1)], dim=1).flatten(0, 1))
        rows.append(separator[None])
    return torch.cat(rows)
