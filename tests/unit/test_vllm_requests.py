"""Content parts for vLLM: what is in them, and what is refused before anything is posted."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from opticnerve.integrations.vllm import Encoder, Reference, RowsError, offline
from opticnerve.media import Digest, Frames, Video
from opticnerve.tensors import Embedding, Grid, Held, ItemPlan, Span, Timings
from opticnerve.v1 import encoder_pb2 as pb

HIDDEN = 4
DIGEST = bytes(range(32))


def encoder(architecture: str = "qwen3_vl", levels: int = 2) -> Encoder:
    layout = pb.Layout(hidden=HIDDEN, deepstack_levels=levels)
    return Encoder.of(pb.GetServerInfoResponse(architecture=architecture, fingerprint="fp", layout=layout))


def plan(grid: Grid, kind: str = "image", **changes: Any) -> ItemPlan:
    tokens = grid.t * grid.h * grid.w // 4
    whole = ItemPlan(grid, 2, 16 * grid.h, 16 * grid.w, tokens, (Span(kind, tokens, 0, 0, 0.0),), (), (), 0.0)
    return replace(whole, **changes)


def embedding(
    of: ItemPlan, *, levels: int = 2, dtype: Any = ml_dtypes.bfloat16, seed: int = 0, **changes: Any
) -> Embedding:
    rows = np.random.default_rng(seed).standard_normal((of.tokens, HIDDEN * (1 + levels))).astype(dtype)
    timings = Timings(0, 0, 0, 0, 0, 0)
    return replace(Embedding(rows, HIDDEN, of, DIGEST, 0, (), timings, False, "one", True), **changes)


def held(of: ItemPlan, *, levels: int = 2, address: str = "10.0.0.1:50051") -> Held:
    return Held(of, HIDDEN, levels, DIGEST, address, 60.0, False, "one")


def decoded(text: str) -> torch.Tensor:
    tensor: torch.Tensor = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    return tensor


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_inline_rows_are_bit_equal(dtype: Any) -> None:
    source = embedding(plan(Grid(1, 4, 6)), dtype=dtype)
    part = json.loads(json.dumps(encoder().inline(source)))
    rows = decoded(part["image_embeds"]["image_embeds"])
    assert rows.shape == (6, 12)
    assert rows.dtype == getattr(torch, np.dtype(dtype).name)
    assert rows.contiguous().view(torch.uint8).numpy().tobytes() == source.array.tobytes()
    assert part["image_embeds"]["image_grid_thw"] == [1, 4, 6]
    assert part["type"] == "image_embeds"
    assert part["uuid"] == f"opticnerve:fp:{np.dtype(dtype).name}:{DIGEST.hex()}::::"


def test_a_reference_has_no_rows_and_the_same_uuid() -> None:
    of = plan(Grid(1, 4, 6))
    part = encoder().by_reference(held(of))
    assert part == {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 4, 6]}, "uuid": part["uuid"]}
    assert part["uuid"] == encoder().inline(embedding(of))["uuid"]
    assert encoder().transfer_params([part], [held(of)]) == {part["uuid"]: {"address": "10.0.0.1:50051"}}


@pytest.mark.parametrize("architecture", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_videos_with_the_times_of_their_frames(architecture: str) -> None:
    of = plan(Grid(2, 4, 6), "frame", timestamps=(0.25, 1.25))
    part = encoder(architecture).by_reference(held(of))
    assert part["type"] == "video_embeds"
    assert part["video_embeds"] == {"video_grid_thw": [2, 4, 6], "timestamps": [0.25, 1.25]}


def test_videos_with_the_time_between_their_frames() -> None:
    of = plan(Grid(2, 4, 6), "frame", second_per_grid_ts=0.5)
    fields = encoder("qwen2_5_vl").by_reference(held(of))["video_embeds"]
    assert decoded(fields.pop("second_per_grid_ts")) == 0.5
    assert fields == {"video_grid_thw": [2, 4, 6]}


def wrong_rows() -> dict[str, Embedding]:
    image = plan(Grid(1, 4, 6))
    whole = embedding(image)
    nan, infinite = (whole.array.copy() for _ in range(2))
    nan[5, 11], infinite[0, 0] = np.nan, -np.inf
    return {
        "a row less": replace(whole, array=whole.array[:-1]),
        "no deepstack": embedding(image, levels=0),
        "another hidden size": replace(whole, hidden=HIDDEN // 2),
        "one axis": replace(whole, array=np.zeros((6, 12, 1), np.float32)[..., 0].reshape(6, 12)[:, :8]),
        "nan": replace(whole, array=nan),
        "infinite": replace(whole, array=infinite),
        "float16 nan": replace(whole, array=nan.astype(np.float16)),
        "float16 infinite": replace(whole, array=infinite.astype(np.float16)),
        "a level cut short": replace(whole, array=whole.array[:, :10].copy()),
        "float32 infinite": replace(whole, array=infinite.astype(np.float32)),
        "tokens of another grid": replace(whole, plan=plan(Grid(1, 4, 6), tokens=5)),
        "nothing": replace(whole, plan=plan(Grid(0, 4, 6)), array=whole.array[:0]),
        "a video without its times": embedding(plan(Grid(2, 4, 6), "frame")),
    }


@pytest.mark.parametrize("what", wrong_rows())
def test_wrong_rows_are_refused(what: str) -> None:
    with pytest.raises(RowsError):
        encoder().inline(wrong_rows()[what])


@pytest.mark.parametrize("largest", [3.0e38, -3.0e38])
def test_large_rows_are_not_refused(largest: float) -> None:
    source = embedding(plan(Grid(1, 4, 6)))
    source.array[0, 0] = largest
    encoder().inline(source)


def test_references_that_do_not_fit_are_refused() -> None:
    for wrong in (held(plan(Grid(1, 4, 6)), levels=0), held(plan(Grid(1, 4, 6), tokens=7))):
        with pytest.raises(RowsError):
            encoder().by_reference(wrong)


def test_architectures_whose_rows_vllm_does_not_take() -> None:
    with pytest.raises(ValueError, match=r"'gemma3'.*uuid"):
        encoder("gemma3")


def test_offline_inputs() -> None:
    images = [embedding(plan(Grid(1, 4, 6)), seed=1), embedding(plan(Grid(1, 2, 4)), seed=2)]
    video = embedding(plan(Grid(2, 2, 4), "frame", timestamps=(0.25, 1.25)), seed=3)
    found = offline([encoder().inline(one) for one in (*images, video)])
    data, uuids = found["multi_modal_data"], found["multi_modal_uuids"]
    assert torch.equal(data["image"]["image_embeds"], torch.cat([one.torch() for one in images]))
    assert data["image"]["image_grid_thw"].tolist() == [[1, 4, 6], [1, 2, 4]]
    assert torch.equal(data["video"]["video_embeds"], video.torch())
    assert data["video"]["timestamps"] == [[0.25, 1.25]]
    assert [len(uuids[kind]) for kind in ("image", "video")] == [2, 1]


def test_offline_inputs_by_reference() -> None:
    part = encoder().by_reference(held(plan(Grid(1, 4, 6))))
    found = offline([part, part])
    assert {name: value.tolist() for name, value in found["multi_modal_data"]["image"].items()} == {
        "image_grid_thw": [[1, 4, 6]] * 2
    }
    with pytest.raises(ValueError, match="1 of 2 image parts have image_embeds"):
        offline([part, encoder().inline(embedding(plan(Grid(1, 4, 6))))])


@pytest.mark.parametrize(
    ("sampled", "media"),
    [
        (None, Digest(DIGEST)),
        (Video("clip.mp4"), Digest(DIGEST)),
        (Video("clip.mp4", fps=1 / 3), Digest(DIGEST, 1 / 3)),
        (Frames([], 24.0, num_frames=8), Digest(DIGEST, num_frames=8)),
        (Frames([], 24.0, sample_fps=1e-5, min_frames=4, max_frames=768), Digest(DIGEST, 1e-5, None, 4, 768)),
        (Digest(DIGEST, 2.0), Digest(DIGEST, 2.0)),
    ],
)
def test_a_uuid_tells_what_to_fetch(sampled: Any, media: Digest) -> None:
    reference = Reference.of(DIGEST, "fp", "float16", sampled)
    assert reference.media == media
    assert Reference.parse(reference.uuid) == reference


def test_different_rows_have_different_uuids() -> None:
    references = [
        Reference.of(DIGEST, fingerprint, dtype, sampled).uuid  # type: ignore[arg-type]
        for fingerprint in ("fp", "fp2")
        for dtype in ("bfloat16", "float32")
        for sampled in (None, Video("x", fps=1), Video("x", num_frames=1), Video("x", min_frames=1))
    ]
    assert len(set(references)) == len(references)


@pytest.mark.parametrize(
    "uuid",
    [
        "",
        "cat",
        f"lora:opticnerve:fp:bfloat16:{'0' * 64}::::",
        f"opticnerve:fp:int8:{'0' * 64}::::",
        f"opticnerve:fp:bfloat16:{'x' * 64}::::",
        f"opticnerve:fp:bfloat16:{'0' * 64}:::",
        f"opticnerve:fp:bfloat16:{'0' * 64}:a:::",
        "opticnerve:fp:bfloat16:00::::",
    ],
)
def test_other_uuids_are_not_ours(uuid: str) -> None:
    assert Reference.parse(uuid) is None
