"""The front-end's side of admission: refusals, many calls, and a full socket."""

from __future__ import annotations

import asyncio
import socket

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2

import opticnerve
from fake_engine import FakeEngine
from frontend_harness import collect, details_of, picture, raw_item, reason_of, serving, until
from golden.test_clips import planner_of
from opticnerve.media import to_items
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve_server import messages
from opticnerve_server.admission import MAX_UNSENT, Admission
from opticnerve_server.budgets import cut
from opticnerve_server.config import MAX_QUEUE_ITEMS
from opticnerve_server.errors import ServiceError
from opticnerve_server.limits import MAX_SAMPLED_FRAMES
from opticnerve_server.messages import (
    Grant,
    Granted,
    GrantKind,
    Hold,
    ItemRequest,
    Refused,
    Reserve,
    Slot,
    Submit,
    TooLate,
)
from opticnerve_server.models.base import Sampling, VideoItem
from opticnerve_server.models.grid import PATH
from opticnerve_server.store import NAME_BYTES, VARIANT_BYTES
from opticnerve_server.types import Capacity

REQUEST = pb.EncodeRequest(items=[raw_item(picture(16, 16))] * 2)


async def test_what_an_item_asks_for() -> None:
    async with serving() as server:
        server.engine.hold_grants = True
        items = [pb.Item(), raw_item(picture(9, 15)), raw_item(picture(8, 8))]
        collecting = asyncio.create_task(
            collect(server.stub.Encode(pb.EncodeRequest(items=items, dtype=pb.DTYPE_FLOAT32)))
        )
        await until(lambda: len(server.engine.held) == 1)
        reserve = server.engine.held[0]
        assert isinstance(reserve, Reserve)
        assert reserve.indices == [1, 2], "an item that has failed already asks for nothing"
        assert reserve.items == [
            ItemRequest(tokens=4, encoded_bytes=items[1].ByteSize(), pixel_bytes=16 * 16 * 3, row_bytes=4 * 32 * 4),
            ItemRequest(tokens=1, encoded_bytes=items[2].ByteSize(), pixel_bytes=192, row_bytes=128),
        ]
        server.engine.resume()
        answers = await collecting
        assert answers[0].failed is not None
        assert answers[1].finished is not None


async def test_a_full_queue_is_refused_with_a_hint() -> None:
    async with serving() as server:
        server.engine.refuse = Refused(0, "tokens", 8, 1000, 0.7)
        call = server.stub.Encode(REQUEST)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason_of(caught.value) == "QUEUE_FULL"
        details = details_of(caught.value)
        retry, quota, info = details["RetryInfo"], details["QuotaFailure"], details["ErrorInfo"]
        assert isinstance(retry, error_details_pb2.RetryInfo)
        assert isinstance(quota, error_details_pb2.QuotaFailure)
        assert isinstance(info, error_details_pb2.ErrorInfo)
        assert retry.retry_delay.ToMilliseconds() == 700
        assert quota.violations[0].subject == "tokens"
        assert dict(info.metadata) == {"resource": "tokens", "requested": "8", "limit": "1000"}
        server.engine.refuse = None
        assert len(await collect(server.stub.Encode(REQUEST))) == 2


async def test_what_cannot_be_there_in_time_is_refused_at_once() -> None:
    async with serving() as server:
        server.engine.refuse = TooLate(0, 2.0, 0.5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(server.stub.Encode(REQUEST, timeout=20))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert reason_of(caught.value) == "EXPIRED_IN_QUEUE"
        assert "2.00 s" in str(caught.value.details())
        info = details_of(caught.value)["ErrorInfo"]
        assert isinstance(info, error_details_pb2.ErrorInfo)
        assert dict(info.metadata) == {"stage": "admit", "needed_s": "2.000"}


async def test_a_call_that_can_never_fit_is_invalid() -> None:
    async with serving() as server:
        server.engine.refuse = Refused(0, "bytes", 900, 100, None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(server.stub.Encode(REQUEST))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert reason_of(caught.value) == "REQUEST_TOO_LARGE"
        bad_request = details_of(caught.value)["BadRequest"]
        assert isinstance(bad_request, error_details_pb2.BadRequest)
        assert bad_request.field_violations[0].field == "items"


def test_the_largest_call_fits_in_one_message() -> None:
    most = 1 << 32
    request = ItemRequest(most, most, most, most, bytes(NAME_BYTES + VARIANT_BYTES), fetch=True)
    reserve = Reserve(1 << 40, list(range(MAX_QUEUE_ITEMS)), [request] * MAX_QUEUE_ITEMS, 1e9, "t" * 64, Hold(1e9, 9))
    granted = Granted(1 << 40, [Grant(GrantKind.ENCODE, Slot(most, most, most))] * MAX_QUEUE_ITEMS)
    assert len(messages.encode(reserve)) <= messages.MAX_MESSAGE_BYTES
    assert len(messages.encode(granted)) <= messages.MAX_MESSAGE_BYTES


@pytest.mark.parametrize("architecture", ["qwen2_5_vl", "gemma4"])
def test_the_longest_video_fits_in_one_message(architecture: str) -> None:
    """Also where each frame is a part of its own."""
    planner = planner_of(architecture)
    plan = planner.plan(VideoItem(9999, 29.97, 360, 640, Sampling(num_frames=MAX_SAMPLED_FRAMES)))
    bounds = {PATH: [Capacity(plan.tokens // plan.grid[0], 1, 1, 1 << 20)]}
    parts = cut(plan, planner, bounds)
    assert len(parts) == plan.grid[0] >= MAX_SAMPLED_FRAMES // 2
    submit = Submit(1 << 40, MAX_QUEUE_ITEMS, plan, "bfloat16", parts, "0" * 55)
    assert len(messages.encode(submit)) <= messages.MAX_MESSAGE_BYTES


async def test_a_plan_that_no_message_holds_fails_its_item_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 400)
    [video] = to_items([opticnerve.Frames([picture(8, 8)] * 40, 1.0)])
    async with serving() as server:
        answers = await collect(server.stub.Encode(pb.EncodeRequest(items=[video, raw_item(picture(8, 8))])))
    assert answers[0].failed is not None
    assert answers[0].failed.reason == "ITEM_TOO_LARGE"
    assert "the limit is 400: send fewer frames" in answers[0].failed.message
    assert answers[1].finished is not None


async def test_messages_wait_while_the_socket_is_full() -> None:
    engine = FakeEngine()
    engine.frontend_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    admission = Admission(engine.frontend_end, engine.arena)

    async def one_call() -> None:
        async with admission.reserve({0: ItemRequest(1, 1, 64, 64)}) as items:
            assert len(items) == 1

    with engine._lock:  # the engine reads one message and no more
        calls = [asyncio.create_task(one_call()) for _ in range(MAX_UNSENT + 500)]
        await asyncio.sleep(0.05)
        refused = [call.exception() for call in calls if call.done()]
        assert 0 < len(refused) < 500, "some messages fit in the socket, the rest wait up to the bound"
        assert all(isinstance(error, ServiceError) and error.reason == "QUEUE_FULL" for error in refused)
        assert len(admission._unsent) == MAX_UNSENT
    await asyncio.gather(*calls, return_exceptions=True)
    await until(lambda: len(engine.released) == len(calls) - len(refused))
    admission.close()
    engine.check()
    engine.close()


async def test_without_an_engine_nothing_waits() -> None:
    engine = FakeEngine()
    admission = Admission(engine.frontend_end, engine.arena)
    engine.hold_grants = True

    async def one_call() -> None:
        async with admission.reserve({0: ItemRequest(1, 1, 64, 64)}):
            pass

    waiting = asyncio.create_task(one_call())
    await until(lambda: len(engine.held) == 1)
    engine.die()
    for call in (waiting, asyncio.create_task(one_call())):
        with pytest.raises(ServiceError, match="GPU_FAULT"):
            await call
    assert admission.lost.is_set()
    admission.close()
    engine.close()
