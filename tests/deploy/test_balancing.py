"""The client that we ship balances over the addresses of a name by itself, without a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import Counter

import pytest

from fleet import ADDRESSES, NAME, PORT, Fleet, call_steadily
from opticnerve import Embedding

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

CONNECTION_AGE_S = 300
"""Of the server's transport; gRPC spreads the ends of connections over a tenth more and less."""


async def test_a_new_server_gets_calls_within_the_age_of_a_connection_and_none_is_lost_with_another(
    fleet: Fleet,
) -> None:
    target = f"dns://127.0.0.1:{fleet.names.port}/{NAME}:{PORT}"
    ended, called, newcomer = asyncio.Event(), asyncio.Event(), "127.0.0.5"
    answers = Counter[str]()
    since = {"ready": math.inf, "called": math.inf}

    def on_answer(_: int, embedding: Embedding) -> None:
        if embedding.instance_id not in answers and len(answers) == len(ADDRESSES):
            since["called"] = time.monotonic()
            called.set()
        answers[embedding.instance_id] += 1

    async def direct() -> None:
        await asyncio.sleep(5)
        await asyncio.to_thread(fleet.start, newcomer)
        since["ready"] = time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(called.wait(), 1.2 * CONNECTION_AGE_S)
        print(f"newcomer after {since['called'] - since['ready']:.0f} s, calls by server {sorted(answers.values())}")
        fleet.kill(ADDRESSES[0])
        await asyncio.sleep(10)
        ended.set()

    director = asyncio.create_task(direct())
    numbers = itertools.takewhile(lambda _: not ended.is_set(), itertools.count())
    await call_steadily(target, numbers, on_answer, pause=0.5)
    await director
    assert since["called"] - since["ready"] < 1.1 * CONNECTION_AGE_S
