"""A decoder without a vision tower, on the embeddings of a server: the tokens of the whole model on pixels. In float32.

Images and videos have a size that no processor resizes, so that both sides see the same pixels.
tests/golden/test_transformers.py has the same for more families, without servers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import opticnerve
from decoding import continuation, without_towers
from official_prompts import OFFICIAL
from opticnerve.integrations.transformers import encoder_outputs, expand_prompt
from oracles import load_model, media_of, official_patches
from running_server import Official
from tiny_tokenizer import tiny_tokenizer

RATE = 4.0
Pixels = npt.NDArray[np.uint8]


def image(height_in_tokens: int, width_in_tokens: int, official: Official, seed: int) -> Pixels:
    side = 2 * official.patch
    shape = (height_in_tokens * side, width_in_tokens * side, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def clip(official: Official, seed: int) -> Pixels:
    """Five frames of 8 x 8 tokens: three groups, the last of one frame twice."""
    return np.stack([image(8, 8, official, seed * 10 + number) for number in range(5)])


def from_embeddings(official: Official, media: list[Pixels]) -> tuple[Any, list[int], torch.Tensor]:
    """What the model says without its tower, and the prompt that it was asked."""
    every = RATE if official.architecture == "qwen3_vl" else None  # Qwen2.5-VL takes every frame by itself
    items = [opticnerve.Frames(list(own), RATE, sample_fps=every) if own.ndim == 4 else own for own in media]
    with opticnerve.Client(official.server.address, timeout=120) as client:
        embeddings = list(client.encode(items, dtype="float32"))
    model, prompts = load_model(official.directory), OFFICIAL[official.architecture]
    plans, tokenizer = [item.plan for item in embeddings], tiny_tokenizer(**prompts.marks)
    prompt = tokenizer.encode(prompts.prompt(plans), add_special_tokens=False)
    inputs = expand_prompt(model.config, prompt, plans, tokenizer)
    outputs = encoder_outputs(model, inputs, embeddings)
    with without_towers(model):
        return inputs, *continuation(model, **inputs, mm_encoder_outputs=outputs)


def from_pixels(official: Official, inputs: Any, media: list[Pixels]) -> tuple[list[int], torch.Tensor]:
    """What the whole model says to that prompt, whose grids are those of pixels that nobody resized."""
    patches: dict[str, list[torch.Tensor]] = {}
    for own in media:
        name, frames, groups = ("pixel_values_videos", own, 3) if own.ndim == 4 else ("pixel_values", own[None], 1)
        whole = media_of(frames, groups, patch=official.patch)
        patches.setdefault(name, []).append(official_patches(official.architecture, official.directory, whole))
        assert list(whole.plan.grid) in inputs["image_grid_thw" if groups == 1 else "video_grid_thw"].tolist()
        if groups > 1 and official.architecture == "qwen2_5_vl":
            assert inputs["second_per_grid_ts"].tolist() == [2 / RATE]
    pixels = {name: torch.cat(own) for name, own in patches.items()}
    return continuation(load_model(official.directory), **inputs, **pixels)


def assert_same_tokens(official: Official, prompts: list[list[Pixels]]) -> None:
    """Prompts that differ in an item, not in its size: each has the tokens of its pixels, and others than the next."""
    said = []
    for media in prompts:
        inputs, tokens, logits = from_embeddings(official, media)
        expected_tokens, expected_logits = from_pixels(official, inputs, media)
        assert tokens == expected_tokens
        torch.testing.assert_close(logits, expected_logits, atol=1e-3, rtol=1e-4)
        said.append(tokens)
    assert said[0] != said[1]


def test_tokens_from_embeddings_are_those_from_pixels(official: Official) -> None:
    first, second, other = image(9, 8, official, 0), image(8, 10, official, 1), image(8, 10, official, 2)
    assert_same_tokens(official, [[first, second], [first, other]])


def test_an_image_and_a_video_in_one_prompt(official: Official) -> None:
    still = image(9, 8, official, 0)
    assert_same_tokens(official, [[still, clip(official, 1)], [still, clip(official, 2)]])
