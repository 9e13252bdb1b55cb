"""How a call of the client ends: with its last answer, while the status of the server is still to come."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from fake_service import FakeService, Sleep, answer_all, serving
from frontend_harness import until
from opticnerve import AsyncClient, Client, channel

CALLS = 20


async def encode(client: AsyncClient, number: int) -> None:
    assert len([embedding async for embedding in client.encode([bytes([number])])]) == 1


async def test_a_call_ends_before_its_status_which_closing_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "ENDING_S", 10)
    service = FakeService(answer_all, lambda request: [*answer_all(request), Sleep(1)])
    async with serving(service) as address:
        async with AsyncClient(address, timeout=10) as client:
            await encode(client, 1)
            start = time.monotonic()
            await encode(client, 2)
            assert time.monotonic() < start + 1
        assert 1 <= time.monotonic() - start < 5
        assert not service.cancelled.is_set()


async def test_closing_waits_once_for_statuses_that_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "ENDING_S", 0.3)
    service = FakeService(lambda request: [*answer_all(request), Sleep(60)])
    async with serving(service) as address:
        async with AsyncClient(address, timeout=10) as client:
            await asyncio.gather(*(encode(client, number) for number in range(CALLS)))
            assert len(set(service.peers)) == channel.MAX_CHANNELS
            start = time.monotonic()
        assert 0.3 <= time.monotonic() - start < 0.3 * channel.MAX_CHANNELS / 2
        await asyncio.wait_for(service.cancelled.wait(), 5)


async def test_calls_that_have_ended_are_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds its request: tens of megabytes that nobody frees while the collector is off, or late."""
    calls: list[weakref.ref[Any]] = []
    begin = channel.Connection.encode

    def encode_seen(*arguments: Any) -> Any:
        calls.append(weakref.ref(call := begin(*arguments)))
        return call

    monkeypatch.setattr(channel.Connection, "encode", encode_seen)
    async with serving(FakeService(answer_all)) as address, AsyncClient(address, timeout=10) as client:
        gc.disable()
        try:
            for number in range(CALLS):
                await encode(client, number)
            assert len(calls) == CALLS
            await until(lambda: not any(call() for call in calls))  # the last one's status is still to come
        finally:
            gc.enable()


async def test_an_iterator_may_be_collected_on_the_thread_of_the_sync_client() -> None:
    """In a cycle, such as that of an exception and its frames, it ends wherever the collector happens to run."""
    collected = threading.Event()

    def abandon(address: str) -> None:
        client = Client(address, timeout=10)
        cycle = SimpleNamespace(embeddings=client.encode([b"\x01", b"\x02"]))
        cycle.itself = cycle
        next(cycle.embeddings)
        del cycle
        client._loop.call_soon_threadsafe(lambda: (gc.collect(), collected.set()))
        assert collected.wait(5)
        assert len(list(client.encode([b"\x03"]))) == 1
        client.close()

    service = FakeService(lambda request: [*answer_all(request, order=[0]), Sleep(60)], answer_all)
    async with serving(service) as address:
        gc.disable()  # until it is wanted
        try:
            await asyncio.to_thread(abandon, address)
        finally:
            gc.enable()
        await asyncio.wait_for(service.cancelled.wait(), 5)
