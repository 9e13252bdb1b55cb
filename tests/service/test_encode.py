"""Encode over a real channel, in front of an engine whose rows the test computes for itself."""

from __future__ import annotations

import asyncio
import hashlib
import struct
import time
import zlib

import grpc
import grpc.aio
import ml_dtypes
import numpy as np
import pytest
from google.rpc import error_details_pb2

from fake_engine import rows_of
from fake_planner import FakePlanner
from frontend_harness import Answer, collect, details_of, picture, png_item, raw_item, reason_of, serving, until
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve_server.messages import Failed

WIDTH = FakePlanner.layout.width


def padded(pixels: np.ndarray) -> np.ndarray:
    """What the fake planner leaves in a slot."""
    height, width, _ = pixels.shape
    return np.pad(pixels, ((0, -height % 8), (0, -width % 8), (0, 0)), mode="edge")


def expected_rows(pixels: np.ndarray, dtype: str = "bfloat16") -> bytes:
    in_slot = padded(pixels)
    return rows_of(in_slot, in_slot.shape[0] * in_slot.shape[1] // 64, WIDTH, dtype).tobytes()


def assert_ok(answer: Answer, pixels: np.ndarray, dtype: str = "bfloat16") -> None:
    assert answer.failed is None
    assert answer.started is not None
    assert answer.finished is not None
    assert answer.data == expected_rows(pixels, dtype)
    assert answer.finished.crc32 == zlib.crc32(answer.data)
    assert answer.started.plan.tokens == answer.started.layout.rows == sum(s.rows for s in answer.started.plan.spans)


async def test_image_file_and_raw_image() -> None:
    pixels = picture(20, 33)
    async with serving() as server:
        request = pb.EncodeRequest(items=[png_item(pixels), raw_item(pixels)], model="tiny", fingerprint="fp-1")
        answers = await collect(server.stub.Encode(request))
    assert sorted(answers) == [0, 1]
    for answer in answers.values():
        assert_ok(answer, pixels)
    started, finished = answers[0].started, answers[0].finished
    assert started is not None
    assert finished is not None
    assert (started.plan.grid_thw.t, started.plan.grid_thw.h, started.plan.grid_thw.w) == (1, 6, 10)
    assert (started.plan.processed_height, started.plan.processed_width, started.plan.merge_size) == (24, 40, 2)
    assert [(span.kind, span.rows) for span in started.plan.spans] == [(pb.Span.KIND_IMAGE, 15)]
    layout = started.layout
    assert (layout.dtype, layout.hidden, layout.deepstack_levels) == (pb.DTYPE_BFLOAT16, 16, 1)
    assert layout.projector_applied
    assert started.instance_id == "instance-1"
    dispatch = finished.dispatches[0]
    assert (dispatch.path, dispatch.outcome, dispatch.budget, dispatch.units) == ("default", pb.OUTCOME_REPLAY, 64, 15)
    assert finished.durations.execute.ToMilliseconds() == 2
    assert finished.durations.admit.ToNanoseconds() > 0
    assert finished.durations.preprocess.ToNanoseconds() > 0
    assert not finished.store_hit


async def test_digests_are_those_a_client_computes() -> None:
    pixels = picture(8, 16)
    file = png_item(pixels).encoded_image.data
    async with serving() as server:
        request = pb.EncodeRequest(items=[png_item(pixels), raw_item(pixels)])
        answers = await collect(server.stub.Encode(request))
    assert answers[0].started is not None
    assert answers[1].started is not None
    assert answers[0].started.digest == hashlib.sha256(b"encoded_image\0" + file).digest()
    raw = b"raw_image\0" + struct.pack("<II", 8, 16) + pixels.tobytes()
    assert answers[1].started.digest == hashlib.sha256(raw).digest()


@pytest.mark.parametrize(
    ("number", "name", "numpy_dtype"),
    [
        (pb.DTYPE_UNSPECIFIED, "bfloat16", ml_dtypes.bfloat16),
        (pb.DTYPE_BFLOAT16, "bfloat16", ml_dtypes.bfloat16),
        (pb.DTYPE_FLOAT16, "float16", np.float16),
        (pb.DTYPE_FLOAT32, "float32", np.float32),
    ],
)
async def test_rows_have_the_dtype_asked_for(number: pb.Dtype.ValueType, name: str, numpy_dtype: type) -> None:
    pixels = picture(16, 16)
    async with serving() as server:
        answers = await collect(server.stub.Encode(pb.EncodeRequest(items=[raw_item(pixels)], dtype=number)))
        assert server.engine.submitted[0].dtype == name
    assert_ok(answers[0], pixels, name)
    assert answers[0].started is not None
    assert answers[0].started.layout.dtype == (number or pb.DTYPE_BFLOAT16)
    assert np.frombuffer(answers[0].data, numpy_dtype).reshape(4, WIDTH).shape == (4, WIDTH)


@pytest.mark.parametrize(("limit", "rows_a_chunk"), [(0, 8192), (1 << 20, 16384), (1000, 15), (64, 1), (1, 1)])
async def test_chunks_are_whole_rows_within_the_limit(limit: int, rows_a_chunk: int) -> None:
    tall = limit in (0, 1 << 20)
    pixels = picture(1024, 1032 if tall else 8)  # 128 x 129 tokens of 64 bytes: just over 1 MiB
    async with serving() as server:
        request = pb.EncodeRequest(items=[raw_item(pixels)], max_chunk_bytes=limit)
        sizes = [len(m.chunk.data) async for m in server.stub.Encode(request) if m.WhichOneof("event") == "chunk"]
    row = WIDTH * 2
    tokens = 128 * (129 if tall else 1)
    assert sizes[0] == min(rows_a_chunk, tokens) * row
    assert set(sizes[:-1]) <= {sizes[0]}
    assert sum(sizes) == tokens * row


async def test_default_options_of_a_client_receive_a_large_answer() -> None:
    pixels = picture(1600, 2400, seed=3)
    async with serving() as server:  # 60000 tokens x 128 bytes: 7.3 MiB in all, over gRPC's 4 MiB for one message
        request = pb.EncodeRequest(items=[raw_item(pixels)], dtype=pb.DTYPE_FLOAT32)
        answers = await collect(server.stub.Encode(request))
    assert_ok(answers[0], pixels, "float32")
    assert answers[0].chunks == 15


async def test_items_are_answered_as_they_finish() -> None:
    pictures = [picture(8, 8 * (i + 1), seed=i) for i in range(3)]
    async with serving() as server:
        server.engine.hold_rows = True
        call = server.stub.Encode(pb.EncodeRequest(items=[raw_item(p) for p in pictures]))
        collecting = asyncio.create_task(collect(call))
        await until(lambda: len(server.engine.held) == 3)
        server.engine.held.sort(key=lambda message: -message.index)  # type: ignore[union-attr]
        server.engine.resume()
        answers = await collecting
    assert list(answers) == [2, 1, 0]
    for index, pixels in enumerate(pictures):
        assert_ok(answers[index], pixels)


async def test_many_calls_at_once_get_their_own_rows() -> None:
    pictures = [picture(8 + i, 9 + 3 * i, seed=i) for i in range(24)]
    async with serving() as server:
        calls = [collect(server.stub.Encode(pb.EncodeRequest(items=[png_item(p), raw_item(p)]))) for p in pictures]
        for pixels, answers in zip(pictures, await asyncio.gather(*calls), strict=True):
            assert_ok(answers[0], pixels)
            assert_ok(answers[1], pixels)


async def test_one_broken_among_eight() -> None:
    pictures = [picture(16, 24, seed=i) for i in range(8)]
    items = [png_item(p) for p in pictures]
    items[3] = pb.Item(encoded_image=pb.EncodedImage(data=items[3].encoded_image.data[:-200]))
    async with serving() as server:
        answers = await collect(server.stub.Encode(pb.EncodeRequest(items=items)))
    assert sorted(answers) == list(range(8))
    failed = answers.pop(3).failed
    assert failed is not None
    assert (failed.code, failed.reason) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], "IMAGE_INVALID")
    assert failed.message.startswith("the PNG file is truncated")
    assert not failed.HasField("retry_after")
    for index, answer in answers.items():
        assert_ok(answer, pictures[index])


INVALID_ITEMS = [
    (pb.Item(), "IMAGE_INVALID", "has no media"),
    (pb.Item(encoded_image=pb.EncodedImage()), "IMAGE_INVALID", "the image file is empty"),
    (pb.Item(encoded_image=pb.EncodedImage(data=b"\x89PNG\r\n\x1a\n")), "IMAGE_INVALID", "send the whole file"),
    (pb.Item(encoded_image=pb.EncodedImage(data=b"no image" * 100)), "IMAGE_INVALID", ""),
    (pb.Item(raw_image=pb.RawImage(height=8, width=8, data=bytes(191))), "IMAGE_INVALID", "8 x 8 x 3 are 192"),
    (pb.Item(raw_image=pb.RawImage(height=0, width=8)), "IMAGE_INVALID", "at least 1"),
    (pb.Item(raw_image=pb.RawImage(height=1, width=5000, data=bytes(15000))), "IMAGE_INVALID", "sides must lie in"),
    (pb.Item(raw_image=pb.RawImage(height=300, width=200, data=bytes(180000))), "IMAGE_INVALID", "max_image_pixels"),
    (pb.Item(raw_image=pb.RawImage(height=200, width=200, data=bytes(120000))), "ITEM_TOO_LARGE", "625 tokens"),
    (pb.Item(encoded_video=pb.EncodedVideo(data=b"x")), "IMAGE_INVALID", "none of the known containers"),
    (pb.Item(frame_list=pb.FrameList()), "IMAGE_INVALID", "no frames"),
    (pb.Item(patches=pb.Patches()), "IMAGE_INVALID", "the tensors are none"),
    (pb.Item(digest=pb.Digest(sha256=bytes(31))), "IMAGE_INVALID", "31 bytes, a SHA-256 has 32"),
]


async def test_every_bad_item_fails_alone() -> None:
    good = picture(8, 8)
    items = [item for item, _, _ in INVALID_ITEMS] + [raw_item(good)]
    async with serving(max_image_pixels=50_000, max_item_tokens=624) as server:
        answers = await collect(server.stub.Encode(pb.EncodeRequest(items=items)))
        assert len(server.engine.submitted) == 1, "bad items never ask for room"
    assert_ok(answers.pop(len(INVALID_ITEMS)), good)
    for index, (_, reason, text) in enumerate(INVALID_ITEMS):
        failed = answers[index].failed
        assert failed is not None
        assert (failed.reason, failed.code) == (reason, grpc.StatusCode.INVALID_ARGUMENT.value[0])
        assert text in failed.message
        assert len(failed.message) < 1024
    too_large = answers[8].failed
    assert too_large is not None
    assert dict(too_large.metadata) == {"tokens": "625", "max_item_tokens": "624"}


async def test_a_call_of_only_bad_items_asks_for_no_room() -> None:
    async with serving() as server:
        server.engine.hold_grants = True
        answers = await collect(server.stub.Encode(pb.EncodeRequest(items=[pb.Item(), pb.Item()])))
        assert [answers[i].failed.reason for i in (0, 1)] == ["IMAGE_INVALID"] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("request_", "code", "reason", "kind"),
    [
        (pb.EncodeRequest(), "INVALID_ARGUMENT", "REQUEST_INVALID", "BadRequest"),
        (pb.EncodeRequest(items=[pb.Item()], model="other"), "NOT_FOUND", "MODEL_NOT_LOADED", "ResourceInfo"),
        (
            pb.EncodeRequest(items=[pb.Item()], fingerprint="fp-2"),
            "FAILED_PRECONDITION",
            "FINGERPRINT_MISMATCH",
            "PreconditionFailure",
        ),
        (pb.EncodeRequest(items=[pb.Item()], dtype=77), "INVALID_ARGUMENT", "REQUEST_INVALID", "BadRequest"),  # type: ignore[arg-type]
        (
            pb.EncodeRequest(items=[pb.Item()], max_chunk_bytes=(1 << 20) + 1),
            "INVALID_ARGUMENT",
            "REQUEST_INVALID",
            "BadRequest",
        ),
        (pb.EncodeRequest(items=[pb.Item()] * 9), "INVALID_ARGUMENT", "REQUEST_TOO_LARGE", "BadRequest"),
        (
            pb.EncodeRequest(items=[pb.Item()], delivery=pb.Delivery(hold=pb.Delivery.Hold(reads=1))),
            "INVALID_ARGUMENT",
            "REQUEST_INVALID",
            "BadRequest",
        ),
    ],
)
async def test_bad_requests_fail_whole(request_: pb.EncodeRequest, code: str, reason: str, kind: str) -> None:
    async with serving(max_queue_items=8) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(server.stub.Encode(request_))
        assert caught.value.code().name == code
        assert reason_of(caught.value) == reason
        assert kind in details_of(caught.value)


async def test_a_request_over_the_byte_limit_is_refused_by_grpc() -> None:
    async with serving(max_request_bytes=100_000) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(server.stub.Encode(pb.EncodeRequest(items=[raw_item(picture(200, 200))])))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_failures_of_the_engine_end_their_item_alone() -> None:
    pictures = [picture(8, 8, seed=i) for i in range(4)]
    async with serving() as server:
        server.engine.fail = {
            0: Failed(0, 0, "GPU_MEMORY", "no memory", 0.25),
            1: Failed(0, 1, "NON_FINITE_OUTPUT", "NaN in row 3"),
            2: Failed(0, 2, "INTERNAL", "the forward failed"),
        }
        answers = await collect(server.stub.Encode(pb.EncodeRequest(items=[raw_item(p) for p in pictures])))
    failed = [answers[i].failed for i in range(3)]
    assert [f.reason for f in failed if f] == ["GPU_MEMORY", "NON_FINITE_OUTPUT", "INTERNAL"]
    assert failed[0] is not None
    assert failed[0].retry_after.ToMilliseconds() == 250
    assert_ok(answers[3], pictures[3])


@pytest.mark.parametrize(("reason", "code"), [("EXPIRED_IN_QUEUE", "DEADLINE_EXCEEDED"), ("GPU_FAULT", "UNAVAILABLE")])
async def test_failures_that_end_the_call(reason: str, code: str) -> None:
    async with serving() as server:
        server.engine.fail = {0: Failed(0, 0, reason, "told by the engine")}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(server.stub.Encode(pb.EncodeRequest(items=[raw_item(picture(8, 8))] * 3)))
        assert caught.value.code().name == code
        assert reason_of(caught.value) == reason
        info = details_of(caught.value)["ErrorInfo"]
        assert isinstance(info, error_details_pb2.ErrorInfo)
        assert dict(info.metadata) == ({"stage": "queue"} if reason == "EXPIRED_IN_QUEUE" else {})


async def test_the_deadline_travels_to_the_engine() -> None:
    async with serving(default_timeout=70.0) as server:
        await collect(server.stub.Encode(pb.EncodeRequest(items=[raw_item(picture(8, 8))])))
        await collect(server.stub.Encode(pb.EncodeRequest(items=[raw_item(picture(8, 8))]), timeout=30))
        without, within = (message.deadline - time.monotonic() for message in server.engine.reserved)
    assert 50 < without < 71  # gRPC rounds up what it sends
    assert 10 < within < 31


async def test_bugs_leak_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("secret of /models/secret")

    async with serving() as server:
        monkeypatch.setattr(FakePlanner, "fill_pixels", broken)
        answers = await collect(server.stub.Encode(pb.EncodeRequest(items=[raw_item(picture(8, 8))])))
        failed = answers[0].failed
        assert failed is not None
        assert failed.reason == "INTERNAL"
        texts = [str(failed)]
        monkeypatch.undo()
        monkeypatch.setattr("opticnerve_server.wire.plan_message", broken)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(server.stub.Encode(pb.EncodeRequest(items=[raw_item(picture(8, 8))])))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        request_info = details_of(caught.value)["RequestInfo"]
        assert isinstance(request_info, error_details_pb2.RequestInfo)
        texts.append(str(caught.value.details()) + str(caught.value.trailing_metadata()))
    for text in texts:
        for word in ("secret", "RuntimeError", "Traceback", "/models", ".py", "opticnerve_server"):
            assert word not in text
    assert "secret of /models/secret" in caplog.text, "the log has the stack trace"
    assert request_info.request_id in str([vars(record) for record in caplog.records])


async def test_parts_of_an_item_are_one_stream() -> None:
    pictures = [picture(40, 64), picture(8, 8), picture(64, 24)]
    async with serving() as server:
        server.engine.part_rows = 7
        request = pb.EncodeRequest(items=[raw_item(pixels) for pixels in pictures], max_chunk_bytes=256)
        answers = await collect(server.stub.Encode(request))
    for index, pixels in enumerate(pictures):
        assert_ok(answers[index], pixels)
        finished = answers[index].finished
        assert finished is not None
        rows = -(-pixels.shape[0] // 8) * -(-pixels.shape[1] // 8)
        assert [dispatch.units for dispatch in finished.dispatches] == [7] * (rows // 7) + [rows % 7] * bool(rows % 7)


async def test_the_rows_of_a_part_are_sent_before_the_next_is_done() -> None:
    pixels = picture(40, 64)
    async with serving() as server:
        server.engine.part_rows, server.engine.fail_after_parts = 10, True
        server.engine.fail = {0: Failed(0, 0, "NON_FINITE_OUTPUT", "the tower returned NaN")}
        answers = await collect(server.stub.Encode(pb.EncodeRequest(items=[raw_item(pixels), raw_item(pixels)])))
    broken = answers[0]
    assert broken.started is not None
    assert broken.finished is None
    assert broken.data == expected_rows(pixels)[: 30 * WIDTH * 2]
    assert broken.failed is not None
    assert broken.failed.reason == "NON_FINITE_OUTPUT"
    assert_ok(answers[1], pixels)
