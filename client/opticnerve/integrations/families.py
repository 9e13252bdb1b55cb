"""The families of transformers: what stands in for a placeholder, and what each wants beside the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from opticnerve.integrations import prompts
from opticnerve.integrations.prompts import Layout, Vocabulary

Slot: TypeAlias = Callable[[Vocabulary], int]
"""Finds a token."""


def named(name: str) -> Slot:
    """The token that the configuration has under this name."""
    return lambda words: int(getattr(words.config, name))


def marked(name: str) -> Slot:
    """The token that the tokenizer has under this name."""
    return lambda words: words.mark(name)


_IMAGE, _VIDEO = named("image_token_id"), named("video_token_id")


@dataclass(frozen=True)
class Family:
    """What a model of transformers wants beside the rows. A slot is the placeholder that its chat template writes."""

    image: Layout
    video: Layout | None = None  # None: it takes none
    image_slot: Slot = _IMAGE
    video_slot: Slot = _VIDEO
    frames_are_images: bool = False  # rows of a video go to the token of images
    one_output: bool = False  # and are given among those of the images, in their order in the prompt
    types: tuple[str, ...] = ()  # names of its token type ids
    grids: bool = False  # M-RoPE: positions come from the grids
    seconds: bool = False  # and from the seconds between the groups of a video
    deepstack: bool = False
    tiles: bool = False  # rows are one tensor of tiles
    projects: bool = False  # it applies its projector to what it is given


_MROPE: Any = {"types": ("mm_token_type_ids",), "grids": True}
_QWEN3_VL = Family(prompts.bare_image, prompts.qwen3_video, deepstack=True, **_MROPE)
_QWEN3_5 = Family(prompts.bare_image, prompts.qwen3_video, **_MROPE)
_GLM4V = Family(prompts.bare_image, prompts.glm4v_video, frames_are_images=True, **_MROPE)
_GLM46V = Family(prompts.bare_image, prompts.glm46v_video, frames_are_images=True, **_MROPE)

FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family(prompts.bare_image, prompts.bare_video, **_MROPE),
    "qwen2_5_vl": Family(prompts.bare_image, prompts.qwen2_5_video, seconds=True, **_MROPE),
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "glm4v": _GLM4V,
    "glm4v_moe": _GLM4V,
    "glm46v": _GLM46V,
    "ernie4_5_vl_moe": Family(
        prompts.bare_image, prompts.bare_video, types=("mm_token_type_ids", "moe_mm_token_type_ids"), grids=True
    ),
    "gemma4": Family(prompts.gemma4_image, prompts.gemma4_video, types=("mm_token_type_ids",)),
    "gemma3": Family(prompts.gemma3_image, image_slot=named("boi_token_id"), types=("token_type_ids",), tiles=True),
    "internvl": Family(
        prompts.internvl_image,
        prompts.internvl_video,
        video_slot=marked("<video>"),
        frames_are_images=True,
        one_output=True,
        tiles=True,
    ),
    "llama4": Family(prompts.llama4_image, image_slot=marked("<|image|>"), tiles=True, projects=True),
    "step3p7": Family(prompts.step3p7_image),
}
"""By model_type of the decoder's configuration."""


def family_of(config: Any) -> Family:
    """By the configuration of a decoder. Raises ValueError for a model that is not supported."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(f"{config.model_type} is none of {', '.join(FAMILIES)}")
    return family
