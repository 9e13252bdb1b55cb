"""What is between gRPC and the service: bytes that are no message, room to plan, how the end of a call is counted."""

from __future__ import annotations

import asyncio
import io
import logging
import threading
import time
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from PIL import Image

from fake_planner import FakePlanner
from frontend_harness import (
    Gate,
    Harness,
    collect,
    details_of,
    picture,
    png_item,
    raw_item,
    reason_of,
    serving,
    until,
    until_gone,
)
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve_server.interceptors import DEADLINE_TOLERANCE_S, is_expired
from opticnerve_server.metrics import ITEMS, REJECTED, REQUESTS, Rejection, Result
from opticnerve_server.preprocess import HEADER_THREADS, LIGHT_BYTES, LIGHT_HEADER, LIGHT_ITEMS, LIGHT_SIDE

PAIR = pb.EncodeRequest(items=[raw_item(picture(8, 8))] * 2)


def count(metric: Any, *labels: str) -> float:
    return float(metric.labels(*labels)._value.get())


@pytest.mark.parametrize("method", ["Encode", "PlanItems", "GetServerInfo", "Release"])
async def test_bytes_that_are_no_message(method: str, caplog: pytest.LogCaptureFixture) -> None:
    before = count(REQUESTS, method, "INVALID_ARGUMENT")
    path = f"/opticnerve.v1.EncoderService/{method}"
    data = b"\x0a\xff no message"
    with caplog.at_level(logging.WARNING):
        async with serving() as server:
            channel = server.channel
            call = channel.unary_stream(path)(data).read() if method == "Encode" else channel.unary_unary(path)(data)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(caught.value) == "REQUEST_INVALID"
    assert "DecodeError" not in str(caught.value.details())
    assert count(REQUESTS, method, "INVALID_ARGUMENT") == before + 1
    assert not caplog.records


async def refused_while_planning(server: Harness) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(server.stub.Encode(PAIR))
    assert reason_of(caught.value) == "QUEUE_FULL"
    details = details_of(caught.value)
    info, retry = details["ErrorInfo"], details["RetryInfo"]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert isinstance(retry, error_details_pb2.RetryInfo)
    assert dict(info.metadata) == {"resource": "planning", "requested": "2", "limit": "5"}
    assert 0 < retry.retry_delay.ToMilliseconds() <= 1000


async def test_no_more_items_wait_to_be_planned_than_the_queue_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    rejected = count(REJECTED, Rejection.QUEUE_FULL)
    async with serving(max_queue_items=5) as server:
        monkeypatch.setattr(FakePlanner, "plan", gate.before(FakePlanner.plan))
        calls = [asyncio.create_task(collect(server.stub.Encode(PAIR))) for _ in range(2)]
        await until(lambda: gate.inside == 2)
        await refused_while_planning(server)
        assert count(REJECTED, Rejection.QUEUE_FULL) == rejected + 1
        sizes = pb.PlanItemsRequest(items=[pb.MediaSize(size=pb.MediaSize.Size(height=8, width=8))] * 9)
        planned = asyncio.create_task(plan(server, sizes))
        gate.open.set()
        for answers in await asyncio.gather(*calls):
            assert all(answer.finished for answer in answers.values())
        assert len((await planned).items) == 9, "sizes have a bound of their own"
        assert len(await collect(server.stub.Encode(PAIR))) == 2


async def plan(server: Harness, request: pb.PlanItemsRequest) -> pb.PlanItemsResponse:
    return await server.stub.PlanItems(request)


async def test_calls_that_are_gone_make_room_to_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    async with serving(max_queue_items=5) as server:
        monkeypatch.setattr(FakePlanner, "plan", gate.before(FakePlanner.plan))
        calls = [server.stub.Encode(PAIR) for _ in range(2)]
        await until(lambda: gate.inside == 2)
        for call in calls:
            call.cancel()
        await until(server.frontend._service.idle.is_set)
        await refused_while_planning(server)  # the threads are still at it
        gate.open.set()
        await until(lambda: server.frontend._preprocessor._items._items == 0)
        assert gate.inside == 2
        assert len(await collect(server.stub.Encode(PAIR))) == 2


async def test_a_few_small_files_are_planned_without_a_thread() -> None:
    gate = threading.Event()
    async with serving() as server:
        for _ in range(HEADER_THREADS):
            server.frontend._preprocessor._headers.submit(gate.wait, 10)
        small, large, deep, longer, half = (png_item(picture(8, 8)) for _ in range(5))
        large.encoded_image.data += bytes(LIGHT_BYTES)
        deep.encoded_image.data = jpeg_behind(LIGHT_HEADER)
        half.encoded_image.data = jpeg_behind(LIGHT_HEADER // 2)
        longer.encoded_image.data = half.encoded_image.data + bytes(LIGHT_BYTES // 2)
        strip = png_item(0 * picture(8, LIGHT_SIDE + 8))
        heavy = (
            PAIR,
            of([small, large]),
            of([small, deep]),
            of([half] * 2),
            of([small] * (LIGHT_ITEMS + 1)),
            of([strip]),
        )
        waiting = [asyncio.create_task(collect(server.stub.Encode(request))) for request in heavy]
        for request in (of([small]), of([longer]), of([small] * LIGHT_ITEMS)):
            assert all(answer.finished for answer in (await collect(server.stub.Encode(request))).values())
        assert not any(call.done() for call in waiting)
        gate.set()
        *planned, refused = await asyncio.gather(*waiting)
        assert all(answer.finished for answers in planned for answer in answers.values())
        assert refused[0].failed, "this planner takes no such strip"


def jpeg_behind(count: int) -> bytes:
    """A JPEG file whose size stands behind a comment of so many bytes."""
    written = io.BytesIO()
    Image.fromarray(picture(8, 8)).save(written, "JPEG", comment=b" " * count)
    return written.getvalue()


def of(items: list[pb.Item]) -> pb.EncodeRequest:
    return pb.EncodeRequest(items=items)


def test_what_counts_as_expired() -> None:
    assert [is_expired(left) for left in (None, float("inf"), 1.0)] == [False] * 3
    assert [is_expired(left) for left in (0.0, DEADLINE_TOLERANCE_S / 2)] == [True] * 2


async def test_a_caller_that_leaves_a_little_before_its_deadline_has_expired() -> None:
    calls, items = count(REQUESTS, "Encode", "DEADLINE_EXCEEDED"), count(ITEMS, Result.EXPIRED)
    async with serving() as server:
        server.engine.hold_rows = True
        call = server.stub.Encode(PAIR, timeout=0.5)
        await until(lambda: len(server.engine.held) == 2)
        left = call.time_remaining()
        assert left is not None
        await asyncio.sleep(left - DEADLINE_TOLERANCE_S / 2)
        call.cancel()
        await until_gone(server)
        server.engine.resume()
    assert count(REQUESTS, "Encode", "DEADLINE_EXCEEDED") == calls + 1
    assert count(ITEMS, Result.EXPIRED) == items + 2


async def test_a_caller_without_a_deadline_has_the_default_one() -> None:
    calls, items = count(REQUESTS, "Encode", "DEADLINE_EXCEEDED"), count(ITEMS, Result.EXPIRED)
    async with serving(default_timeout=0.3) as server:
        server.engine.hold_rows = True
        patient = asyncio.create_task(collect(server.stub.Encode(PAIR, timeout=20)))
        started = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(server.stub.Encode(PAIR))
        assert 0.25 < time.monotonic() - started < 5
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert reason_of(caught.value) == "EXPIRED_IN_QUEUE"
        assert "0.3 s" in str(caught.value.details())
        assert not patient.done(), "its own deadline counts"
        server.engine.resume()
        assert all(answer.finished for answer in (await patient).values())
    assert count(REQUESTS, "Encode", "DEADLINE_EXCEEDED") == calls + 1
    assert count(ITEMS, Result.EXPIRED) == items + 2


async def test_no_reflection() -> None:
    async with serving(reflection=False) as server:
        mirror = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mirror.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")])).read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
