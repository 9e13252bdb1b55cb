"""The other calls, `plan`, `info` and `health`, and the client for code without an event loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from fake_service import SERVICE, Abort, FakeService, Sleep, answer_all, failed, image_plan, serving
from opticnerve import AsyncClient, Client, ItemPlan, ProtocolError, errors
from opticnerve.v1 import encoder_pb2 as pb

HEADER_NEEDED = 100_000


def planner(request: pb.PlanItemsRequest) -> pb.PlanItemsResponse:
    """Tokens = width of a size, first byte of a header; needs HEADER_NEEDED bytes of a file; refuses height 1."""
    response = pb.PlanItemsResponse()
    for item in request.items:
        if item.WhichOneof("source") == "header":
            if len(item.header) < HEADER_NEEDED:
                response.items.add(need_bytes=HEADER_NEEDED)
            else:
                response.items.add(plan=image_plan(item.header[0]))
        elif item.size.height == 1:
            failure = failed(0, grpc.StatusCode.INVALID_ARGUMENT, "ITEM_TOO_LARGE").failed
            response.items.add(failed=failure)
        else:
            response.items.add(plan=image_plan(item.size.width))
    return response


async def test_plans_come_in_order_and_files_send_only_their_head(tmp_path: Path) -> None:
    service = FakeService(answer_all)
    service.plan = planner
    (tmp_path / "photo.jpg").write_bytes(b"\x09" * 300_000)
    async with serving(service) as address, AsyncClient(address, model="m") as client:
        plans = await client.plan([(480, 5), tmp_path / "photo.jpg", (480, 7), b"\x0b" * 200_000])
    assert [plan.tokens for plan in plans] == [5, 9, 7, 11]
    assert (plans[0].grid, plans[0].merge_size) == ((1, 2, 10), 2)
    assert (plans[0].processed_height, plans[0].processed_width) == (32, 160)
    first, second = service.plan_requests
    assert first.model == second.model == "m"
    assert [len(item.header) for item in first.items] == [0, 65536, 0, 65536]
    assert [len(item.header) for item in second.items] == [HEADER_NEEDED, HEADER_NEEDED]


async def test_a_plan_that_encode_would_refuse() -> None:
    service = FakeService(answer_all)
    service.plan = planner
    async with serving(service) as address, AsyncClient(address) as client:
        with pytest.raises(errors.ItemTooLargeError, match="item 1"):
            await client.plan([(2, 2), (1, 2)])
        answers = await client.plan([(2, 2), (1, 2), bytes(10)], return_errors=True)
    assert isinstance(answers[0], ItemPlan)
    assert isinstance(answers[1], errors.ItemTooLargeError)
    assert isinstance(answers[2], errors.ImageInvalidError)
    assert "item 2: the image file ends after 10 bytes" in str(answers[2])


async def test_files_that_end_too_soon() -> None:
    service = FakeService(answer_all)
    service.plan = lambda _: pb.PlanItemsResponse(items=[pb.PlannedItem(need_bytes=4096)] * 2)  # less than is sent
    async with serving(service) as address, AsyncClient(address) as client:
        short, empty = await client.plan([bytes(10), b""], return_errors=True)
    assert str(short).startswith("item 0: the image file ends after 10 bytes, before its size is known")
    assert str(empty).startswith("item 1: the image file is empty")


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (pb.PlanItemsResponse(), "answers 0 of 1 sizes"),
        (pb.PlanItemsResponse(items=[pb.PlannedItem()]), "size 0: the server answers nothing"),
        (pb.PlanItemsResponse(items=[pb.PlannedItem(need_bytes=65536)]), "answers need_bytes to 65536 header bytes"),
    ],
)
async def test_plans_against_the_contract(response: pb.PlanItemsResponse, message: str) -> None:
    service = FakeService(answer_all)
    service.plan = lambda _: response
    async with serving(service) as address, AsyncClient(address) as client:
        with pytest.raises(ProtocolError, match=message):
            await client.plan([bytes(100_000)])


async def test_info_and_health_answer_before_the_server_is_ready() -> None:
    info = pb.GetServerInfoResponse(model="m", phase=pb.PHASE_LOADING)
    async with (
        serving(FakeService(answer_all, info=info), healthy=False) as address,
        AsyncClient(address, timeout=5) as client,
    ):
        assert await client.info() == info
        assert await client.health() == await client.health(SERVICE) == "NOT_SERVING"
        with pytest.raises(errors.NotFoundError):
            await client.health("no.such.Service")


async def test_the_limit_that_info_tells_is_kept_to() -> None:
    info = pb.GetServerInfoResponse(limits=pb.Limits(max_request_bytes=1000))
    service = FakeService(answer_all, info=info)
    async with serving(service) as address, AsyncClient(address) as client:
        await client.info()
        with pytest.raises(errors.RequestTooLargeError, match="the server takes 1000"):
            await anext(client.encode([bytes(1000)]))
    assert service.encode_requests == []


async def test_calls_that_do_not_wait_fail_where_nothing_listens() -> None:
    async with AsyncClient("127.0.0.1:1", timeout=10) as client:
        with pytest.raises(errors.UnavailableError):
            await client.info()
        with pytest.raises(errors.UnavailableError):
            await client.health()


async def test_a_deadline_of_info_is_a_deadline_error() -> None:
    class Silent(FakeService):
        async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
            await asyncio.sleep(60)
            return self.info

    async with serving(Silent(answer_all)) as address, AsyncClient(address) as client:
        with pytest.raises(errors.DeadlineExceededError, match=r"no complete answer within 0\.2 s"):
            await client.info(timeout=0.2)


async def test_the_sync_client_does_the_same_calls() -> None:
    info = pb.GetServerInfoResponse(model="m")
    service = FakeService(lambda request: answer_all(request, order=[2, 0, 1]), info=info)
    service.plan = planner

    def calls(address: str) -> None:
        with Client(address, timeout=10) as client:
            embeddings = list(client.encode([b"\x01", b"\x02", b"\x03"], dtype="float32"))
            assert [int(embedding.array[0, 0]) for embedding in embeddings] == [1, 2, 3]
            assert [plan.tokens for plan in client.plan([(2, 6)])] == [6]
            assert client.info() == info
            assert client.health() == "SERVING"
            with pytest.raises(errors.NotFoundError):
                client.health("no.such.Service")

    async with serving(service) as address:
        await asyncio.to_thread(calls, address)


async def test_the_sync_client_yields_before_the_call_ends_and_cancels_it() -> None:
    service = FakeService(lambda request: [*answer_all(request, order=[0]), Sleep(60)])

    def first(address: str) -> int:
        with Client(address) as client, closing(client.encode([b"\x01", b"\x02"])) as embeddings:
            return int(next(embeddings).array[0, 0])

    async with serving(service) as address:
        assert await asyncio.to_thread(first, address) == 1
        await asyncio.wait_for(service.cancelled.wait(), 5)


async def test_the_sync_client_raises_the_same_errors() -> None:
    def script(request: pb.EncodeRequest) -> list[Any]:
        return [failed(1, grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_INVALID"), *answer_all(request, order=[0])]

    def calls(address: str) -> None:
        with Client(address, timeout=10) as client:
            with pytest.raises(errors.ImageInvalidError):
                list(client.encode([b"\x01", b"\x02"]))
            _, failure = client.encode([b"\x01", b"\x02"], return_errors=True)
            assert isinstance(failure, errors.ImageInvalidError)
            with pytest.raises(TypeError, match="put it into a list"):
                list(client.encode("photo.jpg"))

    async with serving(FakeService(script)) as address:
        await asyncio.to_thread(calls, address)


async def test_one_sync_client_serves_many_threads() -> None:
    def call(client: Client, number: int) -> int:
        [embedding] = client.encode([bytes([number])])
        return int(embedding.array[0, 0])

    async with serving(FakeService(answer_all)) as address:
        client = Client(address, timeout=20)
        answers = await asyncio.gather(*(asyncio.to_thread(call, client, number) for number in range(20)))
        await asyncio.to_thread(client.close)
    assert answers == list(range(20))


def test_a_closed_sync_client_leaves_no_thread_and_refuses_calls() -> None:
    before = threading.active_count()
    client = Client("127.0.0.1:1")
    embeddings = client.encode([b"x"])
    client.close()
    client.close()
    assert threading.active_count() == before
    for call in (client.info, client.health, lambda: next(embeddings)):
        with pytest.raises(RuntimeError, match="the client is closed"):
            call()


async def test_closing_the_sync_client_ends_the_iterators_it_gave_out() -> None:
    service = FakeService(lambda request: [*answer_all(request, order=[0]), Sleep(60)])

    def abandon(address: str) -> None:
        client = Client(address)
        embeddings = client.encode([b"\x01", b"\x02"])
        next(embeddings)
        client.close()
        embeddings.close()

    async with serving(service) as address:
        await asyncio.to_thread(abandon, address)
        await asyncio.wait_for(service.cancelled.wait(), 5)


def test_an_interrupt_ends_the_call_and_leaves_the_sync_client_usable() -> None:
    code = """
import signal, socket, opticnerve
silent = socket.create_server(("127.0.0.1", 0))
signal.signal(signal.SIGALRM, signal.default_int_handler)
with opticnerve.Client("127.0.0.1:%d" % silent.getsockname()[1]) as client:
    for _ in range(2):
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            next(client.encode([b"x"]))
        except KeyboardInterrupt:
            print("interrupted")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert (run.stdout, run.stderr, run.returncode) == ("interrupted\ninterrupted\n", "", 0)


async def test_errors_of_a_whole_call_carry_the_servers_details() -> None:
    abort = Abort(grpc.StatusCode.FAILED_PRECONDITION, "FINGERPRINT_MISMATCH", metadata={"fingerprint": "abc"})
    async with serving(FakeService(lambda _: [abort])) as address, AsyncClient(address, fingerprint="x") as client:
        with pytest.raises(errors.FingerprintMismatchError) as raised:
            await anext(client.encode([b"x"]))
    assert (raised.value.metadata, raised.value.index) == ({"fingerprint": "abc"}, None)
