"""A decoder without a vision tower, on the embeddings of a server: the tokens of the whole model on pixels. In float32.

Images and videos have a size that no processor resizes, so that both sides see the same pixels.
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
from oracles import load_model, media_of, official_patches
from running_server import Official
from tiny_models import TOKENS

NEW_TOKENS = 16
TEXT, IMAGE, VIDEO = 0, 1, 2  # of mm_token_type_ids
PLACEHOLDERS = {IMAGE: TOKENS["image_token_id"], VIDEO: TOKENS["video_token_id"]}
RATE = 4.0

Runs = list[tuple[int, int]]
"""Kind and number of the placeholders of each run of a prompt."""


def image(height_in_tokens: int, width_in_tokens: int, official: Official, seed: int) -> npt.NDArray[np.uint8]:
    side = 2 * official.patch
    shape = (height_in_tokens * side, width_in_tokens * side, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def prompts_of(official: Official) -> list[list[npt.NDArray[np.uint8]]]:
    """Two prompts of two images, which differ in the second one, not in its size."""
    first, second, other = image(9, 8, official, 0), image(8, 10, official, 1), image(8, 10, official, 2)
    return [[first, second], [first, other]]


def prompt(runs: Runs) -> dict[str, torch.Tensor]:
    """Words around runs of placeholders, of which there is one for every row."""
    ids, types = [1, 5, 17], [TEXT] * 3
    for kind, count in runs:
        ids += [TOKENS["vision_start_token_id"], *[PLACEHOLDERS[kind]] * count, TOKENS["vision_end_token_id"], 33]
        types += [TEXT, *[kind] * count, TEXT, TEXT]
    return {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        "mm_token_type_ids": torch.tensor([types]),
    }


def images_of(tokens: list[int]) -> Runs:
    return [(IMAGE, count) for count in tokens]


def generate(model: Any, runs: Runs, **media: Any) -> tuple[list[int], torch.Tensor]:
    """The tokens that follow a prompt, and their logits [NEW_TOKENS, vocabulary]."""
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    inputs = prompt(runs)
    found = model.generate(**inputs, **media, **settings, output_logits=True, return_dict_in_generate=True)
    return found.sequences[0, inputs["input_ids"].shape[1] :].tolist(), torch.cat(found.logits)


def from_pixels(official: Official, images: list[npt.NDArray[np.uint8]]) -> tuple[list[int], torch.Tensor]:
    """What the whole model says."""
    processed = Qwen2VLImageProcessorPil.from_pretrained(official.directory)(images, return_tensors="pt")
    tokens = [int(count) for count in processed.image_grid_thw.prod(dim=1) // 4]
    for pixels, grid in zip(images, processed.image_grid_thw.tolist(), strict=True):
        assert pixels.shape[:2] == (grid[1] * official.patch, grid[2] * official.patch)  # not resized
    return generate(load_model(official.directory), images_of(tokens), **processed)


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
        images_of([embedding.tokens for embedding in embeddings]),
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


def clip(official: Official, seed: int) -> npt.NDArray[np.uint8]:
    """Five frames of 8 x 8 tokens: three groups, the last of one frame twice."""
    return np.stack([image(8, 8, official, seed * 10 + number) for number in range(5)])


def runs_of(official: Official, image_tokens: int, groups: int, group_tokens: int) -> Runs:
    """An image and a video: Qwen3-VL writes the time before each group, which is a run of its own then."""
    if official.architecture == "qwen3_vl":
        return [(IMAGE, image_tokens), *[(VIDEO, group_tokens)] * groups]
    return [(IMAGE, image_tokens), (VIDEO, groups * group_tokens)]


def video_from_pixels(official: Official, still: npt.NDArray[np.uint8], frames: npt.NDArray[np.uint8]) -> Any:
    """What the whole model says of an image and a video in one prompt."""
    processed = Qwen2VLImageProcessorPil.from_pretrained(official.directory)(still, return_tensors="pt")
    media = media_of(frames, 3, patch=official.patch)
    seconds = {"second_per_grid_ts": torch.tensor([2 / RATE])} if official.architecture == "qwen2_5_vl" else {}
    return generate(
        load_model(official.directory),
        runs_of(official, len(processed.pixel_values) // 4, 3, media.plan.tokens // 3),
        **processed,
        pixel_values_videos=official_patches(official.architecture, official.directory, media),
        video_grid_thw=torch.tensor([media.plan.grid]),
        **seconds,
    )


def video_from_embeddings(official: Official, still: npt.NDArray[np.uint8], frames: npt.NDArray[np.uint8]) -> Any:
    """What the model says of them without its tower, the prompt laid out by the plans."""
    every = RATE if official.architecture == "qwen3_vl" else None  # Qwen2.5-VL takes every frame by itself
    with opticnerve.Client(official.server.address, timeout=120) as client:
        picture, video = client.encode(
            [still, opticnerve.Frames(list(frames), RATE, sample_fps=every)], dtype="float32"
        )
    model = load_model(official.directory)
    model.model.visual = torch.nn.Identity()
    seconds = video.plan.second_per_grid_ts
    return generate(
        model,
        runs_of(official, picture.tokens, len(video.plan.spans), video.plan.spans[0].rows),
        image_grid_thw=torch.tensor([picture.grid]),
        video_grid_thw=torch.tensor([video.grid]),
        mm_encoder_outputs={"image": outputs_of([picture]), "video": outputs_of([video])},
        **({"second_per_grid_ts": torch.tensor([seconds])} if seconds else {}),
    )


def test_an_image_and_a_video_in_one_prompt(official: Official) -> None:
    still, said = image(9, 8, official, 0), []
    for frames in (clip(official, 1), clip(official, 2)):
        tokens, logits = video_from_embeddings(official, still, frames)
        expected_tokens, expected_logits = video_from_pixels(official, still, frames)
        assert tokens == expected_tokens
        torch.testing.assert_close(logits, expected_logits, atol=1e-3, rtol=1e-4)
        said.append(tokens)
    assert said[0] != said[1]
