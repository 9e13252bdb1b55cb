"""A decoder without a vision tower, on the embeddings of a server: the tokens of the whole model on pixels. In float32.

Images have a size that no processor resizes, so that both sides see the same pixels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import Qwen2VLImageProcessorPil
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

import opticnerve
from oracles import load_model
from running_server import Official
from tiny_models import TOKENS

NEW_TOKENS = 16
IMAGE, TEXT = 1, 0  # of mm_token_type_ids


def image(height_in_tokens: int, width_in_tokens: int, official: Official, seed: int) -> npt.NDArray[np.uint8]:
    side = 2 * official.patch
    shape = (height_in_tokens * side, width_in_tokens * side, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def prompts_of(official: Official) -> list[list[npt.NDArray[np.uint8]]]:
    """Two prompts of two images, which differ in the second one, not in its size."""
    first, second, other = image(9, 8, official, 0), image(8, 10, official, 1), image(8, 10, official, 2)
    return [[first, second], [first, other]]


def prompt(tokens: list[int]) -> dict[str, torch.Tensor]:
    """Words around images, with a placeholder for every row of theirs."""
    ids, types = [1, 5, 17], [TEXT] * 3
    for count in tokens:
        ids += [TOKENS["vision_start_token_id"], *[TOKENS["image_token_id"]] * count, TOKENS["vision_end_token_id"], 33]
        types += [TEXT, *[IMAGE] * count, TEXT, TEXT]
    return {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        "mm_token_type_ids": torch.tensor([types]),
    }


def generate(model: Any, tokens: list[int], **media: Any) -> tuple[list[int], torch.Tensor]:
    """The tokens that follow a prompt of images of so many tokens, and their logits [NEW_TOKENS, vocabulary]."""
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    inputs = prompt(tokens)
    found = model.generate(**inputs, **media, **settings, output_logits=True, return_dict_in_generate=True)
    return found.sequences[0, inputs["input_ids"].shape[1] :].tolist(), torch.cat(found.logits)


def from_pixels(official: Official, images: list[npt.NDArray[np.uint8]]) -> tuple[list[int], torch.Tensor]:
    """What the whole model says."""
    processed = Qwen2VLImageProcessorPil.from_pretrained(official.directory)(images, return_tensors="pt")
    tokens = [int(count) for count in processed.image_grid_thw.prod(dim=1) // 4]
    for pixels, grid in zip(images, processed.image_grid_thw.tolist(), strict=True):
        assert pixels.shape[:2] == (grid[1] * official.patch, grid[2] * official.patch)  # not resized
    return generate(load_model(official.directory), tokens, **processed)


def outputs_of(embeddings: list[opticnerve.Embedding]) -> BaseModelOutputWithPooling:
    """What the tower would have returned."""
    main = [torch.from_numpy(embedding.main) for embedding in embeddings]
    levels = [
        [torch.from_numpy(level) for level in same] for same in zip(*(e.deepstack for e in embeddings), strict=True)
    ]
    if not levels:
        return BaseModelOutputWithPooling(pooler_output=main)
    return BaseModelOutputWithDeepstackFeatures(pooler_output=main, deepstack_features=levels)


def from_embeddings(official: Official, images: list[npt.NDArray[np.uint8]]) -> tuple[list[int], torch.Tensor]:
    """What the model says without its tower."""
    with opticnerve.Client(official.server.address, timeout=120) as client:
        embeddings = list(client.encode(images, dtype="float32"))
    model = load_model(official.directory)
    model.model.visual = torch.nn.Identity()
    return generate(
        model,
        [embedding.tokens for embedding in embeddings],
        image_grid_thw=torch.tensor([embedding.grid for embedding in embeddings]),
        mm_encoder_outputs={"image": outputs_of(embeddings)},
    )


def test_tokens_from_embeddings_are_those_from_pixels(official: Official) -> None:
    prompts, said = prompts_of(official), []
    for images in prompts:
        tokens, logits = from_embeddings(official, images)
        expected_tokens, expected_logits = from_pixels(official, images)
        assert tokens == expected_tokens
        torch.testing.assert_close(logits, expected_logits, atol=1e-3, rtol=1e-4)
        said.append(tokens)
    assert said[0] != said[1]
