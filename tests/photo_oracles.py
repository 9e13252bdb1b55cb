"""What each model's own code makes of a photograph, with the weights of a checkpoint that `make-checkpoint` wrote.

The oracles of the walk over all architectures: one entry each in ORACLES.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from safetensors.torch import load_file

import kimi_oracle
from oracles import grid_rows
from tiny_models import TINY

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Oracle:
    """`rows` makes the rows float32 [tokens, width] of an RGB image [height, width, 3], of a checkpoint's directory.

    `budgets` are those to serve with; `outcomes` how all dispatches of cat.png, then those of astronaut.jpg, run then.
    """

    rows: Callable[[Path, Pixels], torch.Tensor]
    budgets: str
    outcomes: tuple[str, str]


# --- transformers on the same files


def load_checkpoint(architecture: str, directory: Path, **changes: Any) -> Any:
    """The official model with the tower of the checkpoint, in float32, and a tiny language model of random weights.

    `changes` are those of vision_config that the small model is built with. Every tensor of the tower must be there
    under its published name.
    """
    build = TINY[architecture].build
    assert build is not None
    vision = json.loads((directory / "config.json").read_text())["vision_config"]
    model = build({**vision, **changes})
    loaded, info = type(model).from_pretrained(
        directory, config=model.config, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
    )
    strange = [*info["missing_keys"], *info["unexpected_keys"], *(name for name, *_ in info["mismatched_keys"])]
    assert not [name for name in strange if not any(part in name for part in LANGUAGE)]
    return loaded.eval()


LANGUAGE = ("language_model.", "lm_head.", "embed_tokens.")
"""Parts of the names of a language model's tensors."""


def processed(architecture: str, directory: Path, image: Pixels) -> Any:
    """What the official processor returns."""
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    settings.pop("image_processor_type")
    with torchvision_resize():
        processor = TINY[architecture].processor(**settings)
        return processor(image, input_data_format="channels_last", return_tensors="pt")


@contextmanager
def torchvision_resize() -> Iterator[None]:
    """The official processors resize with torchvision. Their twins for machines without it then do it as that does."""
    with (
        mock.patch("transformers.image_processing_backends.np_resize", _resize),
        mock.patch("transformers.models.gemma4.image_processing_pil_gemma4.resize", _resize),
    ):
        yield


def _resize(image: Pixels, size: tuple[int, int], resample: int, **_: Any) -> Pixels:
    """uint8 [3, height, width] at another size."""
    mode = {Image.Resampling.BILINEAR: "bilinear", Image.Resampling.BICUBIC: "bicubic"}[Image.Resampling(resample)]
    planes = torch.from_numpy(np.ascontiguousarray(image))[None]
    resized: Pixels = F.interpolate(planes, size, mode=mode, antialias=True)[0].numpy()
    return resized


def grid(architecture: str, **changes: Any) -> Oracle:
    def rows(directory: Path, image: Pixels) -> torch.Tensor:
        inputs, model = processed(architecture, directory, image), load_checkpoint(architecture, directory, **changes)
        return grid_rows(model, inputs.pixel_values, inputs.image_grid_thw)

    return Oracle(rows, "128", ("replay", "eager"))


@torch.inference_mode()
def gemma4_rows(directory: Path, image: Pixels) -> torch.Tensor:
    inputs, model = processed("gemma4", directory, image), load_checkpoint("gemma4", directory, text_hidden=128)
    features = model.get_image_features(inputs["pixel_values"], inputs["image_position_ids"]).pooler_output
    return torch.cat(list(features))


def tiles(architecture: str, **changes: Any) -> Oracle:
    """Budgets of 1, 3 and 8 tiles: of more, an image goes as parts."""

    @torch.inference_mode()
    def rows(directory: Path, image: Pixels) -> torch.Tensor:
        model = load_checkpoint(architecture, directory, text_hidden=128, **changes)
        features = model.get_image_features(processed(architecture, directory, image).pixel_values).pooler_output
        flat: torch.Tensor = features.flatten(0, 1)
        return flat

    return Oracle(rows, "4,12,32", ("replay", "replay"))


# --- models whose official processor, names or classes transformers lacks


@torch.inference_mode()
def llama4_rows(directory: Path, image: Pixels) -> torch.Tensor:
    """The official processor exists for torchvision alone. Its steps, in float32, for more than 16 tiles hold."""
    side, planes = 56, torch.from_numpy(image).permute(2, 0, 1)
    height, width = planes.shape[1:]
    grids = [(rows, columns) for rows in range(1, 17) for columns in range(1, 17) if rows * columns <= 16]
    scales = {(r, c): (np.float32(r * side) / height, np.float32(c * side) / width) for r, c in grids}
    best = max(map(min, scales.values()))
    assert best < 1
    # The smallest canvas of those on which the image is largest; it fills the tighter side.
    rows, columns = min((grid for grid in grids if min(scales[grid]) == best), key=math.prod)
    size = math.floor(height * best), math.floor(width * best)
    size = (rows * side, size[1]) if scales[rows, columns][0] <= scales[rows, columns][1] else (size[0], columns * side)
    canvas = torch.zeros(3, rows * side, columns * side, dtype=torch.uint8)
    canvas[:, : size[0], : size[1]] = F.interpolate(planes[None], size, mode="bilinear", antialias=True)[0]
    cut = canvas.view(3, rows, side, columns, side).permute(1, 3, 0, 2, 4).flatten(0, 1)
    whole = F.interpolate(planes[None], (side, side), mode="bilinear", antialias=True)
    pixels = (torch.cat([cut, whole]).bfloat16() * (1 / 255) - 0.5) / 0.5
    model = load_checkpoint("llama4", directory, text_hidden=128)
    projected: torch.Tensor = model.multi_modal_projector(model.get_image_features(pixels.float()).last_hidden_state)
    return projected.flatten(0, 1)


@torch.inference_mode()
def internvl_chat_rows(directory: Path, image: Pixels) -> torch.Tensor:
    """The authors' files by transformers' class, which has other names; their code resizes with Pillow."""
    config = json.loads((directory / "config.json").read_text())
    vision = config["vision_config"]
    side, build = vision["image_size"], TINY["internvl"].build
    assert build is not None
    renamed = {"attention_bias": vision.pop("qkv_bias"), "use_qk_norm": True}  # the authors' default
    squares = {"image_size": (side, side), "patch_size": (vision["patch_size"],) * 2}
    model = build({**vision, **renamed, **squares, "text_hidden": 128}).eval()
    weights = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        for old, new in INTERNVL_NAMES:
            name = name.replace(old, new)
        parts = zip("qkv", tensor.chunk(3), strict=True) if ".qkv." in name else [("", tensor)]
        weights |= {name.replace(".qkv.", f".{part}_proj."): own.float() for part, own in parts}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not [name for name in (*missing, *unexpected) if not any(part in name for part in LANGUAGE)]
    processor = transformers.GotOcr2ImageProcessorPil(
        size={"height": side, "width": side}, crop_to_patches=True, min_patches=config["min_dynamic_patch"],
        max_patches=config["max_dynamic_patch"], image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225],
    )  # fmt: skip
    pixels = processor(image, input_data_format="channels_last", return_tensors="pt").pixel_values
    flat: torch.Tensor = model.get_image_features(pixels).pooler_output.flatten(0, 1)
    return flat


INTERNVL_NAMES = (
    ("vision_model.", "model.vision_tower."), (".layers.", ".layer."), (".attn.", ".attention."),
    (".proj.", ".projection_layer."),
    (".norm1.", ".layernorm_before."), (".norm2.", ".layernorm_after."), (".ls", ".lambda_"),
    ("class_embedding", "cls_token"), ("patch_embedding", "patch_embeddings.projection"),
    ("position_embedding", "position_embeddings"), ("mlp1.0.", "model.multi_modal_projector.layer_norm."),
    ("mlp1.1.", "model.multi_modal_projector.linear_1."), ("mlp1.3.", "model.multi_modal_projector.linear_2."),
)  # fmt: skip
"""Parts of names in the authors' files, and in transformers."""


def kimi_rows(directory: Path, image: Pixels) -> torch.Tensor:
    """The authors' processor leaves an image of this size as it is, and pads it to whole tokens."""
    rows, columns = (-(-side // 28) for side in image.shape[:2])
    assert 4 * rows * columns <= 4096
    padded = np.zeros((28 * rows, 28 * columns, 3), np.uint8)
    padded[: image.shape[0], : image.shape[1]] = image
    return kimi_oracle.rows_of(directory, [padded], torch.float32)


GRID_MODELS = (
    "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen2_5_vl", "qwen2_vl", "glm4v", "glm46v", "glm4v_moe",
)  # fmt: skip
ORACLES: dict[str, Oracle] = {
    **{architecture: grid(architecture) for architecture in GRID_MODELS},
    "ernie4_5_vl_moe": grid("ernie4_5_vl_moe", text_hidden=128),
    "gemma4": Oracle(gemma4_rows, "256", ("eager", "replay")),
    "gemma3": tiles("gemma3"),
    "internvl": tiles("internvl", image_size=(56, 56), patch_size=(14, 14)),
    "internvl_chat": Oracle(internvl_chat_rows, "4,12,32", ("replay", "replay")),
    "llama4": Oracle(llama4_rows, "4,12,32", ("replay", "replay")),
    "kimi_vl": Oracle(kimi_rows, "128", ("replay", "eager")),
}
"""By architecture."""
