"""`AsyncClient.encode` against scripted servers: order, failures, resends, deadlines, the wire contract."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import numpy as np
import pytest

from fake_service import (
    Abort,
    FakeService,
    Sleep,
    Step,
    answer,
    answer_all,
    chunks,
    failed,
    finished,
    rows_of,
    serving,
    started,
)
from opticnerve import AsyncClient, Digest, Embedding, ProtocolError, ServerError, errors
from opticnerve.channel import MAX_CHANNELS, Connection
from opticnerve.chunks import unpack
from opticnerve.retry import Patience
from opticnerve.v1 import encoder_pb2 as pb

ROWS = np.arange(48, dtype=np.float32).reshape(6, 8)


async def encode(address: str, items: list[Any], **options: Any) -> list[Embedding | ServerError]:
    async with AsyncClient(address, timeout=10) as client:
        return [embedding async for embedding in client.encode(items, **options)]


def values(embeddings: list[Any]) -> list[int]:
    """What `rows_of` filled each embedding with; all its numbers must agree."""
    for embedding in embeddings:
        assert embedding.array.shape == (6, 8)
        assert (embedding.array == embedding.array[0, 0]).all()
    return [int(embedding.array[0, 0]) for embedding in embeddings]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
async def test_items_that_finish_out_of_order_come_in_order(dtype: str) -> None:
    service = FakeService(lambda request: answer_all(request, order=[2, 0, 3, 1]))
    async with serving(service) as address:
        embeddings = await encode(address, [b"\x01", b"\x02", b"\x03", b"\x04"], dtype=dtype)
    assert values(embeddings) == [1, 2, 3, 4]
    assert {str(embedding.array.dtype) for embedding in embeddings} == {dtype}
    assert [item.encoded_image.data for item in service.encode_requests[0].items] == [b"\1", b"\2", b"\3", b"\4"]


async def test_an_item_is_yielded_before_the_next_one_is_answered() -> None:
    service = FakeService(lambda request: [*answer_all(request, order=[0]), Sleep(60)])
    async with serving(service) as address, AsyncClient(address) as client:
        async with aclosing(client.encode([b"\x01", b"\x02"])) as embeddings:
            assert values([await anext(embeddings)]) == [1]
        await asyncio.wait_for(service.cancelled.wait(), 5)  # closing the iterator cancels the call


async def test_calls_at_once_have_connections_of_their_own_up_to_a_limit() -> None:
    """One connection leads to one process of a server. Calls one behind another need no second one."""
    service = FakeService(lambda request: [Sleep(0.05), *answer_all(request)])
    async with serving(service) as address, AsyncClient(address, timeout=10) as client:

        async def call(number: int) -> list[int]:
            return values([embedding async for embedding in client.encode([bytes([number])])])

        for number in range(3):
            assert await call(number) == [number]
        assert len(set(service.peers)) == 1
        assert await asyncio.gather(*(call(number) for number in range(40))) == [[number] for number in range(40)]
    each = Counter(service.peers[3:]).values()
    assert (len(each), max(each)) == (MAX_CHANNELS, 40 / MAX_CHANNELS)


async def test_the_embedding_says_what_the_server_said() -> None:
    eager = pb.PathDispatch(path="local", outcome=pb.OUTCOME_EAGER, units=6, batch_items=1, batch_units=6)
    script = [started(0, ROWS), *chunks(0, ROWS), finished(0, ROWS, eager)]
    async with serving(FakeService(lambda _: script)) as address:
        [embedding] = await encode(address, [b"x"], dtype="float32")
    assert isinstance(embedding, Embedding)
    np.testing.assert_array_equal(embedding.array, ROWS)
    assert (embedding.grid, embedding.merge_size, embedding.tokens) == ((1, 2, 12), 2, 6)
    assert (embedding.plan.processed_height, embedding.plan.processed_width) == (32, 192)
    assert [(span.kind, span.rows) for span in embedding.plan.spans] == [("image", 6)]
    assert (embedding.digest, embedding.instance_id) == (bytes(range(32)), "fake-1")
    assert (embedding.outcome, embedding.dispatches[0].path, embedding.dispatches[0].budget) == ("eager", "local", 0)
    assert embedding.timings.execute == 0.003
    assert embedding.timings.total == pytest.approx(0.005)


async def test_no_items_make_no_call() -> None:
    service = FakeService(answer_all)
    async with serving(service) as address:
        assert await encode(address, []) == []
    assert service.encode_requests == []


async def test_a_failed_item_raises_in_its_turn() -> None:
    def script(request: pb.EncodeRequest) -> list[Step]:
        bad = failed(1, grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_INVALID")
        return [bad, *answer_all(request, order=[0, 2])]

    async with serving(FakeService(script)) as address, AsyncClient(address) as client:
        embeddings = client.encode([b"\x01", b"\x02", b"\x03"])
        assert values([await anext(embeddings)]) == [1]
        with pytest.raises(errors.ImageInvalidError, match=r"item 1: as scripted \(IMAGE_INVALID\)") as raised:
            await anext(embeddings)
    assert (raised.value.index, raised.value.code, raised.value.metadata) == (1, "INVALID_ARGUMENT", {"limit": "7"})


async def test_failed_items_as_values_leave_their_neighbours_alone() -> None:
    def script(request: pb.EncodeRequest) -> list[Step]:
        memory = failed(2, grpc.StatusCode.RESOURCE_EXHAUSTED, "GPU_MEMORY", retry_after=0.25)
        bad = failed(0, grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_INVALID")
        return [memory, *answer_all(request, order=[3, 1]), bad]

    async with serving(FakeService(script)) as address:
        first, second, third, fourth = await encode(address, [b"\1", b"\2", b"\3", b"\4"], return_errors=True)
    assert values([second, fourth]) == [2, 4]
    assert isinstance(first, errors.ImageInvalidError)
    assert isinstance(third, errors.GpuMemoryError)
    assert (first.retry_after, third.retry_after, third.index) == (None, 0.25, 2)


async def test_an_item_that_fails_after_it_started_is_a_failed_item() -> None:
    fault = failed(0, grpc.StatusCode.DATA_LOSS, "NON_FINITE_OUTPUT")
    script = [started(0, ROWS), *chunks(0, ROWS)[:1], fault]
    async with serving(FakeService(lambda _: script)) as address:
        [failure] = await encode(address, [b"x"], dtype="float32", return_errors=True)
    assert isinstance(failure, errors.NonFiniteOutputError)


def replaced_offset(message: pb.EncodeResponse, offset: int) -> pb.EncodeResponse:
    return pb.EncodeResponse(
        item_index=message.item_index, chunk=pb.TensorChunk(offset=offset, data=message.chunk.data)
    )


def without_rows(message: pb.EncodeResponse) -> pb.EncodeResponse:
    message.started.layout.rows = 0
    return message


FIRST, SECOND = chunks(0, ROWS)
START, END = started(0, ROWS), finished(0, ROWS)
VIOLATIONS = {
    "short rows": ([START, FIRST, END], "finished after 128 of 192 bytes"),
    "too many rows": ([START, FIRST, SECOND, replaced_offset(SECOND, 192), END], "64 bytes at offset 192"),
    "gap": ([START, replaced_offset(FIRST, 32), SECOND, END], "128 bytes at offset 32 do not continue 0"),
    "repeated chunk": ([START, FIRST, FIRST, END], "at offset 0 do not continue 128"),
    "part of a row": (
        [START, pb.EncodeResponse(item_index=0, chunk=pb.TensorChunk(offset=0, data=bytes(33)))],
        "33 bytes .* in rows of 32",
    ),
    "no end": ([START, FIRST, SECOND], "without an answer to items 0"),
    "no answer": ([], "without an answer to items 0, 1"),
    "rows differ from tokens": ([without_rows(started(0, ROWS))], "0 rows of hidden size 8 for 6 tokens"),
    "other dtype": ([started(0, ROWS.astype(np.float16))], "DTYPE_FLOAT16, float32 was asked for"),
    "interleaved": ([START, FIRST, started(1, ROWS)], "item 1: started arrives before item 0 is finished"),
    "started twice": ([START, START], "item 0: started does not belong here"),
    "chunk before start": ([FIRST], "item 0: chunk does not belong here"),
    "end before start": ([END], "item 0: finished does not belong here"),
    "answered twice": (
        [*answer(0, ROWS), failed(0, grpc.StatusCode.INTERNAL, "INTERNAL")],
        "item 0, which is answered",
    ),
    "never sent": (answer(5, ROWS), "item 5, which is answered already or was never sent"),
    "no event": ([pb.EncodeResponse(item_index=0)], "item 0: None does not belong here"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
async def test_a_breach_of_the_wire_contract_is_a_protocol_error(name: str) -> None:
    script, message = VIOLATIONS[name]
    service = FakeService(lambda _: script)
    async with serving(service) as address:
        with pytest.raises(ProtocolError, match=message):
            await encode(address, [b"x", b"y"], dtype="float32")
    assert len(service.encode_requests) == 1


async def test_rows_that_changed_on_their_way_are_a_checksum_error() -> None:
    script = [started(0, ROWS), *chunks(0, ROWS), finished(0, ROWS, crc32=1)]
    async with serving(FakeService(lambda _: script)) as address:
        with pytest.raises(errors.ChecksumError, match="the server sent 00000001"):
            await encode(address, [b"x"], dtype="float32")


async def test_after_a_broken_stream_only_unfinished_items_are_sent_again() -> None:
    def breaks(request: pb.EncodeRequest) -> list[Step]:
        half = answer(0, rows_of(request.items[0], "float16"))[:2]
        failure = failed(3, grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_INVALID")
        return [failure, *answer_all(request, order=[2]), *half, Abort(grpc.StatusCode.UNAVAILABLE)]

    service = FakeService(breaks, lambda request: answer_all(request, order=[1, 0]))
    async with serving(service) as address, AsyncClient(address, model="m", fingerprint="f") as client:
        items = [b"\x01", b"\x02", b"\x03", b"\x04"]
        answers = [answer async for answer in client.encode(items, dtype="float16", return_errors=True)]
    assert values(answers[:3]) == [1, 2, 3]
    assert isinstance(answers[3], errors.ImageInvalidError)
    assert answers[3].index == 3
    first, second = service.encode_requests
    assert [item.encoded_image.data for item in first.items] == items
    assert [item.encoded_image.data for item in second.items] == [b"\x01", b"\x02"]
    assert (second.model, second.fingerprint, second.dtype) == ("m", "f", pb.DTYPE_FLOAT16)


async def test_a_failure_after_a_resend_names_the_callers_item() -> None:
    def fails(request: pb.EncodeRequest) -> list[Step]:
        return [failed(0, grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_INVALID")]

    service = FakeService(lambda r: [*answer_all(r, order=[0]), Abort(grpc.StatusCode.UNAVAILABLE)], fails)
    async with serving(service) as address:
        _, failure = await encode(address, [b"\x01", b"\x02"], return_errors=True)
    assert isinstance(failure, errors.ImageInvalidError)
    assert failure.index == 1


async def test_a_stream_that_breaks_behind_its_last_item_has_succeeded() -> None:
    service = FakeService(lambda request: [*answer_all(request), Abort(grpc.StatusCode.UNAVAILABLE)])
    async with serving(service) as address:
        assert values(await encode(address, [b"\x01"])) == [1]
    assert len(service.encode_requests) == 1


async def test_a_stream_that_a_proxy_cuts_off_is_sent_again() -> None:
    """gRPC says INTERNAL to it; an INTERNAL of a server has a reason, and is not tried again."""

    class CutOff(FakeService):
        async def Encode(self, request: pb.EncodeRequest, context: Any) -> AsyncIterator[pb.EncodeResponse]:
            async for message in super().Encode(request, context):
                yield message
                if len(self.encode_requests) == 1:
                    await context.abort(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2")

    service = CutOff(lambda request: answer_all(request))
    async with serving(service) as address:
        assert values(await encode(address, [b"\x01"])) == [1]
    assert len(service.encode_requests) == 2

    service = FakeService(lambda _: [Abort(grpc.StatusCode.INTERNAL, "INTERNAL")])
    async with serving(service) as address:
        with pytest.raises(errors.InternalError):
            await encode(address, [b"x"])
    assert len(service.encode_requests) == 1


async def test_a_call_for_one_item_names_it() -> None:
    """By the digest that the server computes, in every attempt; a call for several names none."""
    abort = Abort(grpc.StatusCode.UNAVAILABLE, "DRAINING")
    service = FakeService(lambda _: [abort], lambda request: [*answer_all(request, order=[0]), abort], answer_all)
    digests = [hashlib.sha256(b"encoded_image\0" + data).digest() for data in (b"\x01", b"\x02")]
    async with serving(service) as address, AsyncClient(address, timeout=10) as client:
        assert values([embedding async for embedding in client.encode([b"\x01"])]) == [1]
        assert values([embedding async for embedding in client.encode([b"\x01", b"\x02"])]) == [1, 2]
        await client.release(digests[:1])
        await client.release(digests)
        with pytest.raises(ServerError):  # of the script, which knows no digests
            await anext(client.encode([Digest(digests[1])]))
    one, other = (digest.hex() for digest in digests)
    assert service.digests[:2] == [one, one]
    assert service.digests[2:] == [None, one, None, other]


async def test_resends_are_bounded() -> None:
    def breaks(request: pb.EncodeRequest) -> list[Step]:
        return [started(0, ROWS), Abort(grpc.StatusCode.UNAVAILABLE, "GPU_FAULT", retry_after=0.01)]

    service = FakeService(breaks)
    async with serving(service) as address:
        with pytest.raises(errors.GpuFaultError):
            await encode(address, [b"x"], dtype="float32")
    assert len(service.encode_requests) == 4


async def test_a_full_queue_is_tried_again_when_the_server_says() -> None:
    full = Abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after=0.2)
    service = FakeService(lambda _: [full], lambda _: [full], answer_all)
    async with serving(service) as address:
        begin = time.monotonic()
        assert values(await encode(address, [b"\x07"])) == [7]
        assert time.monotonic() - begin >= 0.4
    assert len(service.encode_requests) == 3


async def test_a_full_queue_that_asks_for_more_than_the_time_left_fails_at_once() -> None:
    full = Abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after=0.9)
    service = FakeService(lambda _: [full])
    async with serving(service) as address:
        begin = time.monotonic()
        with pytest.raises(errors.QueueFullError) as raised:
            await encode(address, [b"x"], timeout=0.5)
        assert time.monotonic() - begin < 0.5
    assert raised.value.retry_after == 0.9
    assert len(service.encode_requests) == 1


@pytest.mark.parametrize("reason", ["GPU_MEMORY", "SLOW_READER", ""])
async def test_other_exhausted_resources_are_not_tried_again(reason: str) -> None:
    service = FakeService(lambda _: [Abort(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, retry_after=0.01)])
    async with serving(service) as address:
        with pytest.raises(errors.ResourceExhaustedError):
            await encode(address, [b"x"])
    assert len(service.encode_requests) == 1


async def test_a_large_request_is_tried_again_by_the_channel_itself() -> None:
    unavailable = Abort(grpc.StatusCode.UNAVAILABLE, "LOADING")
    service = FakeService(lambda _: [unavailable], lambda _: [unavailable], answer_all)
    request = pb.EncodeRequest(items=[pb.Item(encoded_image=pb.EncodedImage(data=b"\x05" * (4 << 20)))])
    async with serving(service) as address:
        connection = Connection(address, wait_until_ready=True)
        messages = [message async for message in connection.encode(request, 10)]
        await connection.close()
    assert messages == [unpack(message.SerializeToString()) for message in answer_all(request)]
    assert len(service.encode_requests) == 3


async def test_a_deadline_names_the_phase_when_no_server_was_ready() -> None:
    info = pb.GetServerInfoResponse(phase=pb.PHASE_CAPTURING, phase_detail="7 of 36 graphs")
    service = FakeService(answer_all, info=info)
    async with serving(service, healthy=False) as address:
        with pytest.raises(errors.DeadlineExceededError, match=f"{address} is CAPTURING 7 of 36 graphs"):
            await encode(address, [b"x"], timeout=0.5)
    assert service.encode_requests == []


async def test_a_deadline_says_when_no_server_answers() -> None:
    with pytest.raises(errors.DeadlineExceededError, match=r"within 0\.3 s: no server answers at 127\.0\.0\.1:1"):
        await encode("127.0.0.1:1", [b"x"], timeout=0.3)


async def test_a_deadline_of_a_ready_server_says_no_phase() -> None:
    async with serving(FakeService(lambda _: [Sleep(60)])) as address:
        with pytest.raises(errors.DeadlineExceededError, match=r"within 0\.5 s \(DEADLINE_EXCEEDED\)"):
            await encode(address, [b"x"], timeout=0.5)


async def test_a_deadline_is_one_even_if_the_stream_breaks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy, or the server, may end the call of a caller whose own timer is late."""
    left = iter([10.0])
    monkeypatch.setattr(Patience, "left", lambda _: next(left, 0.0))
    async with serving(FakeService(lambda _: [Abort(grpc.StatusCode.UNKNOWN)])) as address:
        with pytest.raises(errors.DeadlineExceededError, match="no complete answer within 10 s"):
            await encode(address, [b"x"])


async def test_without_waiting_a_server_that_is_not_ready_answers_why() -> None:
    capturing = Abort(grpc.StatusCode.UNAVAILABLE, "CAPTURING_GRAPHS", "7 of 36 graphs", retry_after=30)
    async with (
        serving(FakeService(lambda _: [capturing]), healthy=False) as address,
        AsyncClient(address, timeout=10, wait_until_ready=False) as client,
    ):
        with pytest.raises(errors.CapturingGraphsError, match="7 of 36 graphs") as raised:
            await anext(client.encode([b"x"]))
    assert raised.value.retry_after == 30


async def test_the_default_client_receives_64_mib() -> None:
    rows = np.arange(16 << 20, dtype=np.float32).reshape(8192, 2048)

    def script(request: pb.EncodeRequest) -> list[Step]:
        return [started(0, rows), *chunks(0, rows, rows_a_chunk=128), finished(0, rows)]

    async with serving(FakeService(script)) as address, AsyncClient(address) as client:
        [embedding] = [embedding async for embedding in client.encode([b"x"], dtype="float32")]
    assert embedding.array.nbytes == 64 << 20
    assert np.array_equal(embedding.array, rows)


async def test_a_request_over_the_servers_limit_is_refused_with_the_remedy() -> None:
    info = pb.GetServerInfoResponse(limits=pb.Limits(max_request_bytes=100_000))
    service = FakeService(answer_all, info=info)
    async with serving(service, max_request_bytes=100_000) as address, AsyncClient(address, timeout=10) as client:
        for _ in range(2):  # refused by gRPC, which tells no limit; then by the client, which has asked for it
            with pytest.raises(errors.RequestTooLargeError, match="the server takes 100000: send fewer items"):
                await anext(client.encode([bytes(60_000), bytes(60_000)]))
        assert values([embedding async for embedding in client.encode([b"\x03" * 60_000])]) == [3]
    assert len(service.encode_requests) == 1


async def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    service = FakeService(answer_all)
    async with serving(service) as address, AsyncClient(address) as client:
        with pytest.raises(ValueError, match="dtype 'int8' is none of bfloat16, float16, float32"):
            await anext(client.encode([b"x"], dtype="int8"))  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="timeout is 0"):
            await anext(client.encode([b"x"], timeout=0))
        with pytest.raises(FileNotFoundError):
            await anext(client.encode([b"x", "no such file.jpg"]))
    with pytest.raises(RuntimeError, match="the client is closed"):
        await anext(client.encode([b"x"]))
    assert service.encode_requests == []
