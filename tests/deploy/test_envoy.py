"""A real Envoy in front of three real servers: the configuration and the client that we ship."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter

import pytest

from fleet import ADDRESSES, BY_CONTENT, BY_LOAD, Fleet, call_steadily, image
from opticnerve import AsyncClient, Embedding
from opticnerve.errors import DeadlineExceededError

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]


async def test_calls_spread_by_load(fleet: Fleet) -> None:
    fleet.start_envoy()
    started = time.monotonic()
    await call_steadily(BY_LOAD, iter(range(3000)))
    calls = fleet.calls()
    print(f"{calls}, {3000 / (time.monotonic() - started):.0f} a second")
    assert sum(calls.values()) == 3000
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
