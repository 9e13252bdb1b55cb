"""Tokens from rows of the service are those from pixels, whichever way rows come; what goes wrong ends one request."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import opticnerve
from opticnerve.integrations.vllm import Reference
from whole_vllm import (
    PROMPTS,
    RATE,
    Alone,
    Answer,
    HttpError,
    Pair,
    WholeVllm,
    connector_flags,
    pixels,
    video_frames,
    whole_vllm,
)


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


def test_a_video(pair: Pair, alone: Alone, vllm: WholeVllm) -> None:
    """Its prompt has the times of its frames, where the model writes them."""
    frames = video_frames(pair.architecture)
    video = opticnerve.Frames(list(frames), RATE, sample_fps=RATE if pair.architecture == "qwen3_vl" else None)
    [held] = pair.client.hold([video], ttl=60, dtype="float32")
    [embedding] = pair.client.encode([video], dtype="float32")
    by_reference = vllm.chat([pair.encoder.by_reference(held, video, "float32")])
    inline = vllm.chat([pair.encoder.inline(embedding, video)])
    for found in (by_reference, inline):
        assert found.prompt == alone.video.prompt
        assert_same(found, alone.video)


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


def test_two_ranks_share_one_fetch(pair: Pair, alone: Alone, vllm_python: Path, tmp_path: Path) -> None:
    flags = connector_flags(pair.service.address, networks=["127.0.0.0/8"])
    with whole_vllm(vllm_python, pair.model, tmp_path / "log", "--tensor-parallel-size", "2", *flags) as vllm:
        request = pair.by_reference([3])
        before = pair.calls()
        assert_same(vllm.chat(**request), vllm.chat([pixels(pair.files[3])]))
        assert pair.calls() - before == 1
        assert_same(vllm.chat(**pair.by_reference([0])), alone.pixels[0])
