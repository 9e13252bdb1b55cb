"""A real Envoy in front of three real servers: the configuration and the client that we ship."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fake_service import SERVICE, FakeService, answer_all
from fleet import ADDRESSES, BY_CONTENT, BY_LOAD, PORT, Fleet, call_steadily, image
from opticnerve import AsyncClient, Digest, Embedding
from opticnerve.errors import DeadlineExceededError
from opticnerve.v1.encoder_pb2_grpc import add_EncoderServiceServicer_to_server
from running_server import eventually

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]


async def test_calls_spread_by_load(fleet: Fleet) -> None:
    fleet.start_envoy()
    started = time.monotonic()
    await call_steadily(BY_LOAD, iter(range(3000)))
    seconds = time.monotonic() - started
    # Calls are counted behind their last answers.
    await asyncio.to_thread(eventually, lambda: sum(fleet.calls().values()) == 3000)
    calls = fleet.calls()
    print(f"{calls}, {3000 / seconds:.0f} a second")
    assert all(abs(count - 1000) <= 100 for count in calls.values())


async def test_no_caller_notices_a_server_that_dies_or_leaves_and_a_new_one_gets_calls(fleet: Fleet) -> None:
    fleet.start_envoy()
    numbers, ended = itertools.count(), asyncio.Event()
    answers = Counter[str]()
    newcomer = {"ready": math.inf, "called": math.inf}

    async def direct() -> None:
        await asyncio.sleep(8)
        fleet.kill(ADDRESSES[1])
        await asyncio.sleep(8)
        await asyncio.to_thread(fleet.start, "127.0.0.5")
        newcomer["ready"] = time.monotonic()
        await asyncio.sleep(15)
        await asyncio.to_thread(fleet.stop, ADDRESSES[2])
        await asyncio.sleep(8)
        ended.set()

    def on_answer(_: int, embedding: Embedding) -> None:
        if embedding.instance_id not in answers and time.monotonic() > newcomer["ready"]:
            newcomer["called"] = time.monotonic()
        answers[embedding.instance_id] += 1

    director = asyncio.create_task(direct())
    await call_steadily(BY_LOAD, itertools.takewhile(lambda _: not ended.is_set(), numbers), on_answer)
    await director
    waited = newcomer["called"] - newcomer["ready"]
    retries = fleet.statistic("cluster.by-load.upstream_rq_retry")
    print(f"{sorted(answers.values())} calls by server, {retries} sent again by Envoy, newcomer after {waited:.1f} s")
    assert answers.total() == next(numbers) - 1, "one was taken from the numbers to end them"
    assert len(answers) == 4
    assert waited < 10


async def test_calls_that_expire_count_against_no_server(fleet: Fleet) -> None:
    fleet.start_envoy()
    expired = 0
    async with AsyncClient(BY_LOAD) as client:
        for number in range(60):
            try:
                await anext(client.encode([image(number)], timeout=0.01))
            except DeadlineExceededError:
                expired += 1
    assert expired > 10
    assert fleet.statistic("cluster.by-load.outlier_detection.ejections_enforced_total") == 0
    assert fleet.healthy() == 3


async def test_repeats_hit_the_store_of_one_server(fleet: Fleet) -> None:
    fleet.start_envoy()
    places: dict[int, set[str]] = {number: set() for number in range(150)}
    hits = Counter[bool]()

    def on_answer(number: int, embedding: Embedding) -> None:
        places[number].add(embedding.instance_id)
        hits[embedding.store_hit] += 1

    await call_steadily(BY_CONTENT, iter(range(150)), on_answer)
    await call_steadily(BY_CONTENT, iter([*range(150)] * 5), on_answer)
    shares = Counter(place for [place] in places.values())
    print(f"{hits[True]} hits of 900, items by server {sorted(shares.values())}")
    assert len(shares) == 3
    assert hits[True] == 750


async def test_held_rows_are_fetched_and_released_where_they_are(fleet: Fleet) -> None:
    fleet.start_envoy()
    async with AsyncClient(BY_CONTENT) as client:
        held = [await client.hold([image(number)], ttl=60) for number in range(30)]
        digests = [one.digest for [one] in held]
        for digest in digests:
            assert (await anext(client.encode([Digest(digest)]))).store_hit
        released = [await client.release([digest]) for digest in digests]
    assert len({one.instance_id for [one] in held}) == 3
    assert released == [1] * 30


@asynccontextmanager
async def scripted(address: str) -> AsyncIterator[health.aio.HealthServicer]:
    """A server that answers everything, for as long as its health says so."""
    server, servicer = grpc.aio.server(), health.aio.HealthServicer()
    add_EncoderServiceServicer_to_server(FakeService(answer_all), server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    server.add_insecure_port(f"{address}:{PORT}")
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(None)


async def test_whichever_server_drains_the_others_are_called(tmp_path: Path) -> None:
    """A client watches health through Envoy too: not that of one server, or it would stop calling all with that one."""
    fleet = Fleet(tmp_path, tmp_path)
    async with scripted(ADDRESSES[0]) as first, scripted(ADDRESSES[1]) as second, AsyncClient(BY_LOAD) as client:
        fleet.names.addresses = [*ADDRESSES[:2]]
        await asyncio.to_thread(fleet.start_envoy)
        try:
            for server in (first, second):
                await anext(client.encode([b"\x01"], timeout=5))
                await server.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
                await asyncio.sleep(1)
                await anext(client.encode([b"\x01"], timeout=5))
                await server.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
                await asyncio.sleep(4)
        finally:
            fleet.close()
