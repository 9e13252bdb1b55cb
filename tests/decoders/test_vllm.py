"""Tokens from rows of the service are those from pixels, whichever way rows come; what goes wrong ends one request."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
import torch

import opticnerve
from opticnerve.integrations.vllm import Reference
from oracles import load_model, media_of, official_patches
from vllm_models import PATCH, TOKENS
from whole_vllm import PROMPTS, Alone, Answer, HttpError, Pair, WholeVllm, pixels

RATE = 4.0


def assert_same(found: Answer, expected: Answer) -> None:
    assert found.tokens == expected.tokens
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-3)


def test_rows_in_the_request(alone: Alone) -> None:
    for inline, from_pixels in zip(alone.inline, alone.pixels, strict=True):
        assert_same(inline, from_pixels)
    assert len({tuple(answer.logprobs) for answer in alone.pixels}) == len(PROMPTS)


def test_rows_by_reference_are_fetched_once(pair: Pair, alone: Alone, vllm: WholeVllm) -> None:
    for images, expected in zip(PROMPTS[:3], alone.pixels, strict=False):
        request = pair.by_reference(images)
        before = pair.calls()
        assert_same(vllm.chat(**request), expected)
        new = pair.calls() - before
        assert_same(vllm.chat(**request), expected)
        assert pair.calls() - before == new
    assert new == 1  # image 0 was fetched for the first prompt


def test_several_requests_at_once(pair: Pair, alone: Alone, vllm: WholeVllm) -> None:
    requests = [pair.by_reference(images) for images in PROMPTS] * 2
    with ThreadPoolExecutor(len(requests)) as threads:
        answers = list(threads.map(lambda request: vllm.chat(**request), requests))
    for found, expected in zip(answers, alone.pixels * 2, strict=True):
        assert_same(found, expected)


def of_transformers(pair: Pair, frames: npt.NDArray[np.uint8], prompt: list[int]) -> list[int]:
    """What the whole model says to vLLM's prompt, from the pixels of a video."""
    media = media_of(frames, len(frames) // 2, patch=PATCH[pair.architecture])
    ids = torch.tensor([prompt])
    seconds = {"second_per_grid_ts": torch.tensor([2 / RATE])} if pair.architecture == "qwen2_5_vl" else {}
    said = load_model(pair.model).generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=torch.where(ids == TOKENS["video_token_id"], 2, 0),
        pixel_values_videos=official_patches(pair.architecture, pair.model, media),
        video_grid_thw=torch.tensor([media.plan.grid]),
        **seconds,
        do_sample=False,
        max_new_tokens=12,
        min_new_tokens=12,
        pad_token_id=0,
        eos_token_id=None,
    )
    found: list[int] = said[0, len(prompt) :].tolist()
    return found


def test_a_video(pair: Pair, vllm: WholeVllm) -> None:
    """transformers is the judge: it gets the pixels, and the prompt as vLLM laid it out."""
    side = 2 * PATCH[pair.architecture]
    frames = np.random.default_rng(5).integers(0, 256, (6, 4 * side, 5 * side, 3), dtype=np.uint8)
    video = opticnerve.Frames(list(frames), RATE, sample_fps=RATE if pair.architecture == "qwen3_vl" else None)
    [held] = pair.client.hold([video], ttl=60, dtype="float32")
    [embedding] = pair.client.encode([video], dtype="float32")
    by_reference = vllm.chat([pair.encoder.by_reference(held, video, "float32")])
    inline = vllm.chat([pair.encoder.inline(embedding, video)])
    assert by_reference.prompt.count(TOKENS["video_token_id"]) == embedding.tokens == 60
    assert_same(by_reference, inline)
    assert by_reference.tokens == of_transformers(pair, frames, by_reference.prompt)


def test_pixels_with_a_uuid_are_not_encoded_again(pair: Pair, alone: Alone, vllm: WholeVllm) -> None:
    request = pair.by_reference([0])
    part = {**pixels(pair.files[0]), "uuid": request["parts"][0]["uuid"]}
    assert_same(vllm.chat([part], ec_transfer_params=request["ec_transfer_params"]), alone.pixels[0])


def test_pixels_are_encoded_by_vllm_where_the_service_has_no_rows(pair: Pair, alone: Alone, vllm: WholeVllm) -> None:
    unknown = Reference.of(bytes(31) + b"\1", pair.encoder.fingerprint, "float32").uuid
    before = pair.calls()
    assert_same(vllm.chat([{**pixels(pair.files[0]), "uuid": unknown}]), alone.pixels[0])
    assert pair.calls() - before == 1
    assert_same(vllm.chat([pixels(pair.files[0])]), alone.pixels[0])
    assert pair.calls() - before == 1


def test_what_cannot_be_had_ends_one_request(pair: Pair, alone: Alone, vllm: WholeVllm) -> None:
    request = pair.by_reference([0])
    unknown = copy.deepcopy(request)
    unknown["parts"][0]["uuid"] = Reference.of(bytes(32), pair.encoder.fingerprint, "float32").uuid
    other = copy.deepcopy(request)
    other["parts"][0]["uuid"] = Reference.of(bytes(32), "another", "float32").uuid
    foreign = copy.deepcopy(request)
    foreign["parts"][0]["uuid"] = "cat"
    address = copy.deepcopy(request)
    fetched_nowhere = pair.by_reference([4])
    address["parts"] = fetched_nowhere["parts"]
    address["ec_transfer_params"] = {address["parts"][0]["uuid"]: {"address": "10.0.0.1:1"}}
    for wrong in (unknown, other, foreign, address):
        with pytest.raises(HttpError) as caught:
            vllm.chat(**wrong)
        assert caught.value.status == 500
        assert_same(vllm.chat(**request), alone.pixels[0])
    assert "NOT_CACHED" in vllm.log.read_text()


def test_wrong_rows_never_reach_the_engine(pair: Pair, alone: Alone, vllm: WholeVllm) -> None:
    grid = pair.by_reference([5])
    grid["parts"][0]["image_embeds"]["image_grid_thw"] = [1, 8, 8]
    inline = pair.inline([0])[0]
    inline["image_embeds"]["image_grid_thw"] = [1, 8, 12]
    for wrong in (grid, {"parts": [inline]}):
        with pytest.raises(HttpError) as caught:
            vllm.chat(**wrong)
        assert caught.value.status >= 400
        assert_same(vllm.chat([pixels(pair.files[0])]), alone.pixels[0])
