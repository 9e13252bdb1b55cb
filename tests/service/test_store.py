"""Equal items through a front-end: encoded once, found again, held under leases; whoever goes away meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from fake_engine import SharingEngine
from fake_planner import FakePlanner
from frontend_harness import Answer, Gate, Harness, collect, picture, raw_item, reason_of, serving, until
from opticnerve.digests import digest_of
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve_server import items
from opticnerve_server.messages import GrantKind
from opticnerve_server.store import key_of, name_of

ITEM = raw_item(picture(16, 16))
FETCH = pb.Item(digest=pb.Digest(sha256=digest_of(ITEM)))
HOLD = pb.Delivery(hold=pb.Delivery.Hold(ttl=Duration(seconds=50), reads=2))


@pytest.fixture
async def server() -> AsyncIterator[Harness]:
    async with serving(engine_class=SharingEngine, store_bytes=32 << 20) as harness:
        yield harness


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr(FakePlanner, "fill_pixels", gate.before(FakePlanner.fill_pixels))
    return gate


def engine_of(server: Harness) -> SharingEngine:
    assert isinstance(server.engine, SharingEngine)
    return server.engine


async def encode(server: Harness, *items: pb.Item, **options: object) -> dict[int, Answer]:
    return await collect(server.stub.Encode(pb.EncodeRequest(items=items, **options)))  # type: ignore[arg-type]


async def one(server: Harness, item: pb.Item, **options: object) -> Answer:
    return (await encode(server, item, **options))[0]


def is_hit(answer: Answer) -> bool:
    assert answer.finished is not None, answer.failed
    return answer.finished.store_hit


def reason(answer: Answer) -> str:
    assert answer.failed is not None
    return answer.failed.reason


async def test_fifty_equal_items_at_once_are_one_encode(server: Harness) -> None:
    engine = engine_of(server)
    engine.hold_rows = True
    calls = [asyncio.create_task(one(server, ITEM)) for _ in range(50)]
    await until(lambda: engine.grants[GrantKind.WAIT] == 49)
    engine.resume()
    answers = await asyncio.gather(*calls)
    assert len(engine.submitted) == 1
    assert sum(not is_hit(answer) for answer in answers) == 1
    assert len({answer.data for answer in answers}) == 1
    assert len(answers[0].data) == 4 * 32 * 2


async def test_stored_rows_are_neither_decoded_nor_encoded(server: Harness) -> None:
    first = await one(server, ITEM)
    again, fetched = await one(server, ITEM), await one(server, FETCH)
    assert [is_hit(answer) for answer in (first, again, fetched)] == [False, True, True]
    assert first.data == again.data == fetched.data
    assert first.started is not None
    assert fetched.started is not None
    assert fetched.started.plan == first.started.plan
    assert fetched.started.digest == first.started.digest
    assert again.finished is not None
    assert again.finished.durations.preprocess.ToNanoseconds() == 0
    assert not again.finished.dispatches
    assert len(engine_of(server).submitted) == 1


async def test_equal_items_of_one_call(server: Harness) -> None:
    answers = await encode(server, ITEM, raw_item(picture(8, 8)), ITEM, FETCH)
    assert sorted(answers) == [0, 1, 2, 3]
    assert answers[0].data == answers[2].data == answers[3].data
    assert len(engine_of(server).submitted) == 2


async def test_what_is_not_there_is_said(server: Harness) -> None:
    answers = await encode(server, FETCH, raw_item(picture(8, 8)))
    assert reason(answers[0]) == "NOT_CACHED"
    assert answers[1].finished is not None, "its neighbour is not hurt"


async def test_another_dtype_is_another_entry(server: Harness) -> None:
    await one(server, ITEM)
    assert reason(await one(server, FETCH, dtype=pb.DTYPE_FLOAT32)) == "NOT_CACHED"
    assert not is_hit(await one(server, ITEM, dtype=pb.DTYPE_FLOAT32))
    assert is_hit(await one(server, FETCH, dtype=pb.DTYPE_FLOAT32))


def test_every_field_of_the_key_matters() -> None:
    fields = {"fingerprint": "f", "sampling": b"s", "dtype": "bfloat16"}
    key = key_of(b"d" * 32, "tenant", **fields)  # type: ignore[arg-type]
    others = [key_of(b"e" * 32, "tenant", **fields), key_of(b"d" * 32, "tenan", **fields)]  # type: ignore[arg-type]
    others += [
        key_of(b"d" * 32, "tenant", **(fields | change))  # type: ignore[arg-type]
        for change in ({"fingerprint": "g"}, {"sampling": b"t"}, {"dtype": "float16"}, {"fingerprint": "f\0bfloat16"})
    ]
    assert len({key, *others}) == 1 + len(others)
    assert len(key) == 32
    assert key.startswith(name_of(b"d" * 32, "tenant"))
    assert sum(other.startswith(name_of(b"d" * 32, "tenant")) for other in others) == 4


async def test_the_first_caller_goes_while_it_decodes(server: Harness, gate: Gate) -> None:
    engine = engine_of(server)
    first = server.stub.Encode(pb.EncodeRequest(items=[ITEM]))
    await until(lambda: gate.inside == 1)
    second, fetch = (asyncio.create_task(one(server, item)) for item in (ITEM, FETCH))
    await until(lambda: engine.grants[GrantKind.WAIT] == 2)
    first.cancel()
    await until(lambda: server.frontend._service._activity._active == 2)
    gate.open.set()
    answers = await asyncio.gather(second, fetch)
    assert len({answer.data for answer in answers}) == 1
    assert [is_hit(answer) for answer in answers] == [False, True]
    assert len(engine.submitted) == 1


async def test_the_first_caller_goes_while_it_waits_for_the_device(server: Harness) -> None:
    engine = engine_of(server)
    engine.hold_rows = True
    first = server.stub.Encode(pb.EncodeRequest(items=[ITEM]))
    await until(lambda: len(engine.submitted) == 1)
    fetch = asyncio.create_task(one(server, FETCH))
    await until(lambda: engine.grants[GrantKind.WAIT] == 1)
    first.cancel()
    await until(lambda: len(engine.released) == 1)
    engine.resume()
    assert is_hit(await fetch)


async def test_the_last_caller_goes_and_nothing_runs(server: Harness) -> None:
    engine = engine_of(server)
    engine.hold_rows = True
    calls = [server.stub.Encode(pb.EncodeRequest(items=[ITEM])) for _ in range(3)]
    await until(lambda: engine.grants[GrantKind.WAIT] == 2)
    for call in calls:
        call.cancel()
    await until(lambda: len(engine.released) == 3)
    engine.resume()
    assert reason(await one(server, FETCH)) == "NOT_CACHED"


async def test_who_fetches_from_a_caller_without_success_is_told_to_send(
    server: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    monkeypatch.setattr(items, "decode", gate.before(items.decode))
    broken = pb.Item(encoded_image=pb.EncodedImage(data=TRUNCATED))
    call = asyncio.create_task(one(server, broken))
    fetch = pb.Item(digest=pb.Digest(sha256=digest_of(broken)))
    await until(lambda: engine_of(server).grants[GrantKind.ENCODE] == 1)
    waiting = asyncio.create_task(one(server, fetch))
    await until(lambda: engine_of(server).grants[GrantKind.WAIT] == 1)
    gate.open.set()
    assert reason(await call) == "IMAGE_INVALID"
    failed = await waiting
    assert reason(failed) == "NOT_CACHED"
    assert failed.failed is not None
    assert "send the media" in failed.failed.message


async def test_held_rows_are_answered_at_once_and_fetched_later(server: Harness) -> None:
    engine = engine_of(server)
    engine.hold_rows = True
    held = await one(server, ITEM, delivery=HOLD)
    assert held.started is not None
    assert held.finished is not None
    assert not held.data
    assert not held.finished.store_hit
    assert held.started.plan.tokens == 4
    assert held.started.digest == digest_of(ITEM)
    assert held.started.address.startswith("127.0.0.1:")
    assert held.started.lease_expiry.ToSeconds() == 50
    fetch = asyncio.create_task(one(server, FETCH))
    await until(lambda: engine.grants[GrantKind.WAIT] == 1)
    engine.resume()
    assert is_hit(await fetch)
    assert engine.ledger.store.leased_bytes
    assert is_hit(await one(server, FETCH))
    await until(lambda: not engine.ledger.store.leased_bytes)  # two reads were asked for


async def test_who_holds_may_go(server: Harness, gate: Gate) -> None:
    call = server.stub.Encode(pb.EncodeRequest(items=[ITEM], delivery=HOLD))
    assert (await call.read()).WhichOneof("event") == "started"  # type: ignore[union-attr]
    call.cancel()
    gate.open.set()
    assert is_hit(await one(server, FETCH))


async def test_who_holds_and_goes_before_it_is_admitted_holds_nothing(server: Harness) -> None:
    engine = engine_of(server)
    engine.hold_grants = True
    call = server.stub.Encode(pb.EncodeRequest(items=[ITEM], delivery=HOLD))
    await until(lambda: len(engine.held) == 1)
    call.cancel()
    await until(server.frontend._service.idle.is_set)
    engine.resume()
    assert reason(await one(server, FETCH)) == "NOT_CACHED"
    assert not engine.ledger.store.leased_bytes


async def test_a_digest_under_hold_is_a_look_up(server: Harness) -> None:
    assert reason(await one(server, FETCH, delivery=HOLD)) == "NOT_CACHED"
    await one(server, ITEM)
    looked = await one(server, FETCH, delivery=HOLD)
    assert is_hit(looked)
    assert not looked.data
    assert looked.started is not None
    assert looked.started.plan.tokens == 4
    assert engine_of(server).ledger.store.leased_bytes


async def test_release_ends_leases(server: Harness) -> None:
    await one(server, ITEM, delivery=HOLD)
    await one(server, ITEM, delivery=HOLD)
    request = pb.ReleaseRequest(digests=[digest_of(ITEM), bytes(32)])
    released = [(await server.stub.Release(request)).released for _ in range(3)]
    assert released == [1, 1, 0]
    assert is_hit(await one(server, FETCH)), "it is only no longer promised"


async def test_no_more_leases_than_room() -> None:
    many = [raw_item(picture(256, 256, seed=i)) for i in range(9)]  # 64 KiB of rows each
    async with serving(engine_class=SharingEngine, max_queue_bytes=4 << 20, max_request_bytes=4 << 20,
                       store_bytes=4 << 20) as server:  # fmt: skip
        engine_of(server).ledger.store.max_bytes = 8 * 1024 * 32 * 2
        answers = await encode(server, *many, delivery=HOLD)
        assert [index for index, answer in sorted(answers.items()) if answer.failed] == [8]
        failed = answers[8].failed
        assert failed is not None
        assert (failed.reason, failed.retry_after.ToSeconds()) == ("STORE_FULL", 1)
        assert (await one(server, many[8])).finished is not None, "without a lease it is encoded"


@pytest.mark.parametrize(
    ("delivery", "text"),
    [
        (pb.Delivery.Hold(ttl=Duration(seconds=601)), "at most 600 s"),
        (pb.Delivery.Hold(ttl=Duration()), "over 0"),
        (pb.Delivery.Hold(ttl=Duration(seconds=-1)), "over 0"),
    ],
)
async def test_leases_that_cannot_be(server: Harness, delivery: pb.Delivery.Hold, text: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=text) as caught:
        await one(server, ITEM, delivery=pb.Delivery(hold=delivery))
    assert reason_of(caught.value) == "REQUEST_INVALID"


async def test_release_of_what_is_no_digest(server: Harness) -> None:
    for request in (pb.ReleaseRequest(), pb.ReleaseRequest(digests=[b"x"])):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.Release(request)
        assert reason_of(caught.value) == "REQUEST_INVALID"


async def test_without_a_store_nothing_is_shared_or_held() -> None:
    async with serving(engine_class=SharingEngine, store_bytes=0) as server:
        answers = await encode(server, ITEM, ITEM, FETCH)
        assert [is_hit(answers[index]) for index in (0, 1)] == [False, False]
        assert reason(answers[2]) == "NOT_CACHED"
        with pytest.raises(grpc.aio.AioRpcError, match="store_bytes is 0"):
            await one(server, ITEM, delivery=HOLD)


def _truncated() -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture(64, 64)).save(file, "JPEG")
    return file.getvalue()[:-400]


TRUNCATED = _truncated()
