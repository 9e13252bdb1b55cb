"""kill -9 on each process of a server, and on callers: who loses calls, who does not, what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

import opticnerve
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve.v1 import encoder_pb2_grpc as pb_grpc
from opticnerve_server.models.checkpoint import write_checkpoint
from running_server import HEAVY, SLOWLY, TAMPERED, WAIT_S, RunningServer, eventually, has_ended, running

LOAD = Path(__file__).parents[1] / "load.py"
CALLS = 16
LIGHT = (256, 256)

Start = Callable[..., RunningServer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kills") / "model"
    write_checkpoint("qwen3_vl", directory)
    return directory


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as servers:

        def start(*flags: str, name: str = "server", **how: Any) -> RunningServer:
            directory = tmp_path / name
            return servers.enter_context(running(model, directory, "--token-budgets", "64", *flags, **SLOWLY, **how))

        yield start


class Callers:
    """Callers with a connection each. `close` ends the connections."""

    def __init__(self, server: RunningServer, count: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        self.channels = [grpc.aio.insecure_channel(server.address, options=options) for _ in range(count)]

    async def __aenter__(self) -> Callers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(channel.close() for channel in self.channels))

    async def encode(self, caller: int, size: tuple[int, int] = LIGHT) -> str:
        """The status of one call with one image."""
        data = np.random.default_rng(caller).bytes(size[0] * size[1] * 3)
        item = pb.Item(raw_image=pb.RawImage(height=size[0], width=size[1], data=data))
        stub: Any = pb_grpc.EncoderServiceStub(self.channels[caller])
        call = stub.Encode(pb.EncodeRequest(items=[item]), timeout=WAIT_S)
        ends = 0
        try:
            async for answer in call:
                ends += answer.WhichOneof("event") == "finished"
        except grpc.aio.AioRpcError as error:
            assert not ends
            return str(error.code().name)
        assert ends == 1
        return "OK"


def assert_close(one: opticnerve.Embedding, other: opticnerve.Embedding) -> None:
    """Their batches may have had different shapes, hence other orders of sums."""
    rows, expected = one.array.astype(np.float32), other.array.astype(np.float32)
    assert np.linalg.norm(rows - expected) <= 2e-2 * np.linalg.norm(expected)


async def calls_waiting(server: RunningServer, callers: Callers) -> list[asyncio.Task[str]]:
    """A call of every caller: the device is at work on the first, the others wait for it."""
    idle = server.engine_seconds()
    calls = [asyncio.create_task(callers.encode(0, HEAVY))]
    await asyncio.to_thread(server.wait_until_busy, idle)
    calls += [asyncio.create_task(callers.encode(caller)) for caller in range(1, CALLS)]
    await asyncio.to_thread(eventually, lambda: server.total("opticnerve_queue_items") == CALLS)
    assert not any(call.done() for call in calls), "the device was free too early for this test"
    return calls


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_front_end_that_ends_loses_its_calls_alone_and_is_replaced(
    start: Start, signum: signal.Signals
) -> None:
    server = start("--frontends", "2", program=TAMPERED, TAMPER_SILENCE_S="3")
    victim, survivor = server.frontends
    async with Callers(server, CALLS) as callers:
        calls = await calls_waiting(server, callers)
        lost = server.connections_of(victim)
        assert 0 < lost < CALLS
        assert lost + server.connections_of(survivor) == CALLS
        os.kill(victim, signum)
        codes = await asyncio.gather(*calls)
    assert sorted(codes) == sorted(["UNAVAILABLE"] * lost + ["OK"] * (CALLS - lost))
    assert server.wait_for("front-end is gone")["items"] == lost
    await asyncio.to_thread(eventually, lambda: server.total("opticnerve_queue_items") == 0)

    def heir() -> list[int]:
        return [pid for pid in server.frontends if pid not in (victim, survivor)]

    [successor] = await asyncio.to_thread(eventually, heir)
    await asyncio.to_thread(eventually, lambda: len(server.events("front-end listening")) == 3)
    while True:  # until it has loaded the model
        async with Callers(server, CALLS) as callers:
            codes = await asyncio.gather(*(callers.encode(caller) for caller in range(CALLS)))
            serves = server.connections_of(successor)
        if serves and set(codes) == {"OK"}:
            break
        assert set(codes) <= {"OK", "UNAVAILABLE"}
    assert server.frontends == [survivor, successor]


async def test_a_killed_engine_ends_every_call_and_the_server(start: Start) -> None:
    server = start("--frontends", "2")
    children = server.children()
    async with Callers(server, CALLS) as callers:
        calls = await calls_waiting(server, callers)
        os.kill(server.engine, signal.SIGKILL)
        assert await asyncio.gather(*calls) == ["UNAVAILABLE"] * CALLS
    assert await asyncio.to_thread(server.exit_code) == 3
    assert all(has_ended(pid) for pid in children)
    server.assert_nothing_left()


async def test_another_engine_gives_the_same_rows_when_one_is_killed(start: Start) -> None:
    server = start("--devices", "0,1", "--frontends", "1")
    victim = server.children()[1]
    image = np.random.default_rng(0).integers(0, 256, (*LIGHT, 3), np.uint8)
    rows: dict[tuple[int, int], set[bytes]] = {}
    async with opticnerve.AsyncClient(server.address) as client:

        async def call() -> None:
            async for embedding in client.encode([image] * 4):
                [dispatch] = embedding.dispatches
                rows.setdefault((dispatch.device, dispatch.batch_units), set()).add(embedding.array.tobytes())

        while {device for device, _ in rows} != {0, 1}:
            await asyncio.gather(*(call() for _ in range(4)))
        assert {units for _, units in rows} == {64}, "one budget"
        assert len(set.union(*rows.values())) == 1, "bit-equal"
        killed = asyncio.Event()

        async def call_until_killed() -> None:
            while not killed.is_set():
                await call()

        calls = [asyncio.create_task(call_until_killed()) for _ in range(CALLS)]
        await asyncio.to_thread(eventually, lambda: server.total("opticnerve_queue_items") > 0)
        os.kill(victim, signal.SIGKILL)
        killed.set()
        await asyncio.gather(*calls)
        assert len(set.union(*rows.values())) == 1
    assert server.health()["readiness"]
    assert server.events("engine died")[0]["device"] == 0


def test_a_caller_killed_in_mid_stream_leaves_nothing_inside(start: Start) -> None:
    server = start()
    caller = subprocess.Popen([sys.executable, LOAD, "stall", server.address], stdout=subprocess.PIPE, text=True)
    with caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "reading\n"
        try:
            eventually(lambda: server.total("opticnerve_queue_items") > 0)
        finally:
            caller.kill()
    for gauge in ("queue_items", "queue_tokens", "queue_bytes", "inflight_items"):
        eventually(lambda gauge=gauge: server.total(f"opticnerve_{gauge}") == 0)
    with opticnerve.Client(server.address) as client:
        assert len(list(client.encode([np.zeros((*LIGHT, 3), np.uint8)]))) == 1


async def test_callers_of_a_killed_server_are_served_by_another(start: Start) -> None:
    """Those who use the shipped client notice nothing."""
    victim, survivor = (start("--store-bytes", "0", name=name) for name in ("victim", "survivor"))
    image = np.random.default_rng(0).integers(0, 256, (*LIGHT, 3), np.uint8)
    target = f"ipv4:{victim.address},{survivor.address}"
    async with opticnerve.AsyncClient(target) as client, opticnerve.AsyncClient(survivor.address) as direct:
        [expected] = [embedding async for embedding in direct.encode([image])]

        async def call() -> None:
            embeddings = [embedding async for embedding in client.encode([image] * 3)]
            assert [embedding.tokens for embedding in embeddings] == [64] * 3
            for embedding in embeddings:
                assert_close(embedding, expected)

        # Until it is connected to both, all calls go to the one that answered first.
        while not victim.total("opticnerve_requests_total", method="Encode", code="OK"):
            await call()
        async with Callers(victim, 1) as callers:
            idle = victim.engine_seconds()
            heavy = asyncio.create_task(callers.encode(0, HEAVY))
            await asyncio.to_thread(victim.wait_until_busy, idle)
            calls = [asyncio.create_task(call()) for _ in range(CALLS)]
            await asyncio.to_thread(eventually, lambda: victim.total("opticnerve_queue_items") > 1)
            victim.process.kill()
            await asyncio.gather(*calls)
            assert await heavy == "UNAVAILABLE"
    await asyncio.to_thread(eventually, lambda: survivor.total("opticnerve_requests_total", code="OK") >= CALLS)
    await asyncio.to_thread(eventually, lambda: survivor.total("opticnerve_queue_items") == 0)


async def test_children_vanish_with_a_killed_supervisor(start: Start) -> None:
    server = start("--frontends", "2")
    children = server.children()
    assert len(children) == 4
    async with Callers(server, CALLS) as callers:
        calls = await calls_waiting(server, callers)
        server.process.kill()
        assert await asyncio.gather(*calls) == ["UNAVAILABLE"] * CALLS
    assert server.exit_code() == -signal.SIGKILL
    for pid in children:
        await asyncio.to_thread(eventually, partial(has_ended, pid))
