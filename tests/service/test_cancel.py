"""A caller that goes away, at every stage: its slots return once, its work is dropped, nothing of it stays behind."""

from __future__ import annotations

import asyncio
import threading

import grpc
import grpc.aio
import numpy as np
import pytest

from fake_planner import FakePlanner
from frontend_harness import Gate, Harness, collect, picture, raw_item, reason_of, serving, until, until_gone
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve_server import preprocess
from opticnerve_server.metrics import ITEMS, REQUESTS, Result

REQUEST = pb.EncodeRequest(items=[raw_item(picture(16, 16, seed=i)) for i in range(4)])


def counted(result: Result) -> float:
    return float(ITEMS.labels(result)._value.get())


async def read_all(call: grpc.aio.UnaryStreamCall[pb.EncodeRequest, pb.EncodeResponse]) -> None:
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass


async def assert_still_works(server: Harness) -> None:
    answers = await collect(server.stub.Encode(REQUEST))
    assert all(answer.finished for answer in answers.values())


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr(FakePlanner, "fill_pixels", gate.before(FakePlanner.fill_pixels))
    return gate


async def test_while_headers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    async with serving() as server:
        monkeypatch.setattr(FakePlanner, "plan", gate.before(FakePlanner.plan))
        call = server.stub.Encode(REQUEST)
        await until(lambda: gate.inside == 1)
        call.cancel()
        await until(server.frontend._service.idle.is_set)
        gate.open.set()
        await assert_still_works(server)
        await until_gone(server)
        assert gate.inside == 1 + 4, "the cancelled call is planned no further than the item that was under way"
        assert len(server.engine.released) == 4, "the cancelled call asked for nothing"


async def test_while_it_asks_for_slots() -> None:
    async with serving() as server:
        server.engine.hold_grants = True
        call = server.stub.Encode(REQUEST)
        await until(lambda: len(server.engine.held) == 1)
        call.cancel()
        await until(server.frontend._service.idle.is_set)
        server.engine.resume()  # grants what nobody wants any more
        await until(lambda: len(server.engine.released) == 4)
        await until_gone(server)
        await assert_still_works(server)


async def test_while_decoding(gate: Gate) -> None:
    async with serving(preprocess_threads=2) as server:
        cancelled = counted(Result.CANCELLED)
        call = server.stub.Encode(REQUEST)
        await until(lambda: gate.inside == 2)
        call.cancel()
        await until(server.frontend._service.idle.is_set)
        await until(lambda: len(server.engine.released) == 2)  # those whose turn had not come
        await asyncio.sleep(0.05)
        assert len(server.engine.released) == 2, "a slot is not given back while a thread writes into it"
        gate.open.set()
        await until_gone(server)
        assert gate.inside == 2, "a cancelled item is never decoded"
        assert not server.engine.submitted
        assert counted(Result.CANCELLED) == cancelled + 4
        await assert_still_works(server)


async def test_while_the_engine_works() -> None:
    async with serving() as server:
        server.engine.hold_rows = True
        call = server.stub.Encode(REQUEST)
        await until(lambda: len(server.engine.held) == 4)
        call.cancel()
        await until_gone(server)
        server.engine.resume()
        await assert_still_works(server)


async def test_rows_that_cross_a_release_are_ignored() -> None:
    async with serving() as server:
        server.engine.hold_rows = True
        call = server.stub.Encode(REQUEST)
        await until(lambda: len(server.engine.held) == 4)
        with server.engine._lock:  # the releases wait in the socket while the answers are on their way
            call.cancel()
            await until(server.frontend._service.idle.is_set)
            server.engine.resume()
        await until_gone(server)
        await assert_still_works(server)


@pytest.mark.parametrize("taken", [0, 1, 3])
async def test_while_rows_are_sent(taken: int) -> None:
    large = raw_item(np.zeros((2048, 2048, 3), np.uint8))  # 65536 tokens x 128 bytes: 8 MiB
    async with serving(max_queue_bytes=128 << 20) as server:
        request = pb.EncodeRequest(items=[large, *REQUEST.items], dtype=pb.DTYPE_FLOAT32)
        call = server.stub.Encode(request)
        for _ in range(taken):
            await call.read()
        if not taken:
            await until(lambda: len(server.engine.submitted) == 5)
        call.cancel()
        await until_gone(server)
        await assert_still_works(server)


async def test_deadline_passes_while_the_engine_works() -> None:
    async with serving() as server:
        expired = counted(Result.EXPIRED)
        server.engine.hold_rows = True
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(server.stub.Encode(REQUEST, timeout=0.3))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_gone(server)
        assert counted(Result.EXPIRED) == expired + 4
        server.engine.resume()
        await assert_still_works(server)


async def test_calls_are_counted_by_how_they_end() -> None:
    def count(code: str) -> float:
        return float(REQUESTS.labels("Encode", code)._value.get())

    codes = ("OK", "CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT")
    before = {code: count(code) for code in codes}
    async with serving() as server:
        await assert_still_works(server)
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(server.stub.Encode(pb.EncodeRequest()))
        server.engine.hold_rows = True
        call = server.stub.Encode(REQUEST)
        await until(lambda: len(server.engine.held) == 4)
        call.cancel()
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(server.stub.Encode(REQUEST, timeout=0.2))
        await until_gone(server)
        assert {code: count(code) - before[code] for code in codes} == dict.fromkeys(codes, 1)


async def test_a_reader_that_stalls_loses_its_call() -> None:
    # By itself gRPC widens its window with what it measures, at times until it takes all of the rows unread.
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 << 10)]
    large = raw_item(np.zeros((4096, 2048, 3), np.uint8))  # 16 MiB of rows
    large_enough = {"max_queue_bytes": 128 << 20, "max_request_bytes": 64 << 20}
    async with serving(channel_options=narrow, stream_stall_timeout=0.3, **large_enough) as server:
        call = server.stub.Encode(pb.EncodeRequest(items=[large], dtype=pb.DTYPE_FLOAT32))
        await call.read()
        await until_gone(server)  # without a word from the caller
        await assert_still_works(server)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason_of(caught.value) == "SLOW_READER"


async def test_decoders_run_at_lower_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    seen: list[int] = []
    fill = FakePlanner.fill_pixels

    def look(*args: object) -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        fill(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(FakePlanner, "fill_pixels", look)
    async with serving() as server:
        await assert_still_works(server)
    assert set(seen) == {min(19, os.getpriority(os.PRIO_PROCESS, 0) + preprocess.DECODE_NICENESS)}
