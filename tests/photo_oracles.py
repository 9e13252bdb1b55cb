"""What each model's own code makes of a photograph, with the weights of a checkpoint that `make-checkpoint` wrote.

The oracles of the walk over all architectures: one entry each in ORACLES.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as got_ocr2

import deepseek_oracle
import kimi_oracle
import step3_oracle
from oracles import grid_rows
from tiny_models import TINY

Pixels = npt.NDArray[np.uint8]


Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Oracle:
    """The two steps of a model's own code, for a checkpoint's directory.

    `process` makes of an RGB image [height, width, 3] what the official processor returns, and `rows` of that the rows
    float32 [tokens, width]. `patches` means that the server takes what `process` returns, as it takes the image.
    `budgets` are those to serve with; `outcomes` how the dispatches of cat.png, then those of astronaut.jpg, run then.
    """

    process: Callable[[Path, Pixels], Tensors]
    rows: Callable[[Path, Tensors], torch.Tensor]
    budgets: str = "128"
    outcomes: tuple[str, str] = ("replay", "eager")
    patches: bool = True


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


def processor(architecture: str) -> Callable[[Path, Pixels], Tensors]:
    def process(directory: Path, image: Pixels) -> Tensors:
        settings = json.loads((directory / "preprocessor_config.json").read_text())
        settings.pop("image_processor_type")
        with torchvision_resize():
            official = TINY[architecture].processor(**settings)
            tensors: Tensors = official(image, input_data_format="channels_last", return_tensors="pt")
        return {name: tensor for name, tensor in tensors.items() if name in WIRE}

    return process


WIRE = ("pixel_values", "image_grid_thw", "image_position_ids")
"""What processors of grids return that patches are made of."""


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
    def rows(directory: Path, inputs: Tensors) -> torch.Tensor:
        model = load_checkpoint(architecture, directory, **changes)
        return grid_rows(model, inputs["pixel_values"], inputs["image_grid_thw"])

    return Oracle(processor(architecture), rows)


@torch.inference_mode()
def gemma4_rows(directory: Path, inputs: Tensors) -> torch.Tensor:
    model = load_checkpoint("gemma4", directory, text_hidden=128)
    features = model.get_image_features(inputs["pixel_values"], inputs["image_position_ids"]).pooler_output
    return torch.cat(list(features))


# --- tiles, whose number alone most official processors tell


def tiles(process: Callable[[Path, Pixels], Tensors], rows: Callable[[Path, Tensors], torch.Tensor]) -> Oracle:
    """Budgets of 1, 3 and 8 tiles: of more, an image goes as parts."""
    return Oracle(process, rows, "4,12,32", ("replay", "replay"))


def gemma3_tiles(directory: Path, image: Pixels) -> Tensors:
    """One tile, without pan-and-scan."""
    return {**processor("gemma3")(directory, image), "aspect_ratios": torch.tensor([[1, 1]])}


@torch.inference_mode()
def gemma3_rows(directory: Path, inputs: Tensors) -> torch.Tensor:
    return flat_features(load_checkpoint("gemma3", directory, text_hidden=128), inputs)


def flat_features(model: Any, inputs: Tensors) -> torch.Tensor:
    rows: torch.Tensor = model.get_image_features(inputs["pixel_values"]).pooler_output.flatten(0, 1)
    return rows


def internvl_tiles(directory: Path, image: Pixels) -> Tensors:
    return {**processor("internvl")(directory, image), "aspect_ratios": internvl_grid(image, 56, 1, 12)}


def internvl_grid(image: Pixels, side: int, least: int, most: int) -> torch.Tensor:
    """Rows and columns of tiles, int64 [1, 2]."""
    columns, rows = got_ocr2.get_optimal_tiled_canvas(image.shape[:2], (side, side), least, most)
    return torch.tensor([[rows, columns]])


@torch.inference_mode()
def internvl_rows(directory: Path, inputs: Tensors) -> torch.Tensor:
    squares = {"image_size": (56, 56), "patch_size": (14, 14)}
    return flat_features(load_checkpoint("internvl", directory, text_hidden=128, **squares), inputs)


def internvl_chat_tiles(directory: Path, image: Pixels) -> Tensors:
    """The authors' code resizes with Pillow."""
    config = json.loads((directory / "config.json").read_text())
    side, least, most = config["vision_config"]["image_size"], config["min_dynamic_patch"], config["max_dynamic_patch"]
    official = got_ocr2.GotOcr2ImageProcessorPil(
        size={"height": side, "width": side}, crop_to_patches=True, min_patches=least, max_patches=most,
        image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225],
    )  # fmt: skip
    pixels = official(image, input_data_format="channels_last", return_tensors="pt").pixel_values
    return {"pixel_values": pixels, "aspect_ratios": internvl_grid(image, side, least, most)}


@torch.inference_mode()
def internvl_chat_rows(directory: Path, inputs: Tensors) -> torch.Tensor:
    """The authors' files by transformers' class, which has other names."""
    vision = json.loads((directory / "config.json").read_text())["vision_config"]
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
    return flat_features(model, inputs)


INTERNVL_NAMES = (
    ("vision_model.", "model.vision_tower."), (".layers.", ".layer."), (".attn.", ".attention."),
    (".proj.", ".projection_layer."), (".norm1.", ".layernorm_before."), (".norm2.", ".layernorm_after."),
    (".ls", ".lambda_"), ("class_embedding", "cls_token"), ("patch_embedding", "patch_embeddings.projection"),
    ("position_embedding", "position_embeddings"), ("mlp1.0.", "model.multi_modal_projector.layer_norm."),
    ("mlp1.1.", "model.multi_modal_projector.linear_1."), ("mlp1.3.", "model.multi_modal_projector.linear_2."),
)  # fmt: skip
"""Parts of names in the authors' files, and in transformers."""


def llama4_tiles(directory: Path, image: Pixels) -> Tensors:
    """The official processor exists for torchvision alone. Its steps, in float32, for more than 16 tiles hold."""
    side, planes = 56, torch.from_numpy(image).permute(2, 0, 1)
    height, width = planes.shape[1:]
    grids = [(rows, columns) for rows in range(1, 17) for columns in range(1, 17) if rows * columns <= 16]
    scales = {(r, c): (np.float32(r * side) / height, np.float32(c * side) / width) for r, c in grids}
    best = max(map(min, scales.values()))
    assert best < 1
    # The smallest canvas of those on which the image is largest; it fills the tighter side.
    rows, columns = min((grid for grid in grids if min(scales[grid]) == best), key=math.prod)
    down, across = scales[rows, columns]
    size = (rows * side, math.floor(width * best)) if down <= across else (math.floor(height * best), columns * side)
    canvas = torch.zeros(3, rows * side, columns * side, dtype=torch.uint8)
    canvas[:, : size[0], : size[1]] = F.interpolate(planes[None], size, mode="bilinear", antialias=True)[0]
    cut = canvas.view(3, rows, side, columns, side).permute(1, 3, 0, 2, 4).flatten(0, 1)
    whole = F.interpolate(planes[None], (side, side), mode="bilinear", antialias=True)
    pixels = (torch.cat([cut, whole]).bfloat16() * (1 / 255) - 0.5) / 0.5
    return {"pixel_values": pixels, "aspect_ratios": torch.tensor([[rows, columns]])}


@torch.inference_mode()
def llama4_rows(directory: Path, inputs: Tensors) -> torch.Tensor:
    model = load_checkpoint("llama4", directory, text_hidden=128)
    adapted = model.get_image_features(inputs["pixel_values"].float()).last_hidden_state
    projected: torch.Tensor = model.multi_modal_projector(adapted.flatten(0, 1))
    return projected


# --- models that transformers does not have


def kimi_patches(directory: Path, image: Pixels) -> Tensors:
    """The authors' processor leaves an image of this size as it is, and pads it to whole tokens."""
    rows, columns = (-(-side // 28) for side in image.shape[:2])
    assert 4 * rows * columns <= 4096
    padded = np.zeros((28 * rows, 28 * columns, 3), np.uint8)
    padded[: image.shape[0], : image.shape[1]] = image
    grid = torch.tensor([[2 * rows, 2 * columns]])
    return {"pixel_values": kimi_oracle.pixel_values(padded), "image_grid_hws": grid}


def kimi_rows(directory: Path, inputs: Tensors) -> torch.Tensor:
    return kimi_oracle.rows_of(directory, inputs["pixel_values"], inputs["image_grid_hws"], torch.float32)


def deepseek_views(directory: Path, image: Pixels) -> Tensors:
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    views = deepseek_oracle.views_of(image, settings["base_size"], settings["image_size"])
    grid = torch.tensor([views.across, views.down])
    return {"whole": torch.from_numpy(views.whole.copy()), "crops": torch.from_numpy(views.crops), "grid": grid}


def deepseek_rows(directory: Path, inputs: Tensors) -> torch.Tensor:
    views = deepseek_oracle.Views(inputs["whole"].numpy(), inputs["crops"].numpy(), *inputs["grid"].tolist())
    return deepseek_oracle.rows_of(directory, [views], torch.float32)


def step3_views(directory: Path, image: Pixels) -> Tensors:
    """The official views as they travel, in steps of 1/256 of a level; tests/golden says what that costs."""
    whole, crops = map(step3_oracle.fixed_point, step3_oracle.official_views(image))
    return {"whole": whole, "crops": crops}


def step3_rows(directory: Path, inputs: Tensors) -> torch.Tensor:
    return step3_oracle.rows_of(directory, inputs["whole"], inputs["crops"], torch.float32)


STEP3 = Oracle(step3_views, step3_rows, "global=4,8 local=160", ("replay", "replay"), patches=False)
GRID_MODELS = (
    "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen2_5_vl", "qwen2_vl", "glm4v", "glm46v", "glm4v_moe",
)  # fmt: skip
ORACLES: dict[str, Oracle] = {
    **{architecture: grid(architecture) for architecture in GRID_MODELS},
    "ernie4_5_vl_moe": grid("ernie4_5_vl_moe", text_hidden=128),
    "gemma4": Oracle(processor("gemma4"), gemma4_rows, "256", ("eager", "replay")),
    "gemma3": tiles(gemma3_tiles, gemma3_rows),
    "internvl": tiles(internvl_tiles, internvl_rows),
    "internvl_chat": tiles(internvl_chat_tiles, internvl_chat_rows),
    "llama4": tiles(llama4_tiles, llama4_rows),
    "kimi_vl": Oracle(kimi_patches, kimi_rows),
    # cat.png has six crops, which are more than the four of the larger photograph.
    "deepseek_ocr": Oracle(
        deepseek_views, deepseek_rows, "global=20,40 local=36", ("replay eager", "replay"), patches=False
    ),
    **dict.fromkeys(("step3_vl", "step_vl", "step3p7"), STEP3),
}
"""By architecture."""
