"""A front-end through the phases of its server, from the first check to the last call."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fake_engine import FakeEngine, rows_of
from fake_planner import FakePlanner
from frontend_harness import (
    READY,
    Harness,
    collect,
    details_of,
    picture,
    raw_item,
    reason_of,
    serving,
    until,
)
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve.v1 import encoder_pb2_grpc as pb_grpc
from opticnerve_server import frontend
from opticnerve_server.config import Config
from opticnerve_server.credentials import NOTHING_KNOWN
from opticnerve_server.info import Model
from opticnerve_server.messages import FrontendAlive, FrontendReady, Occupancy, PhaseChange, Stop, decode, encode
from opticnerve_server.ports import reserve
from opticnerve_server.processes import Child, inherited_fd, run_frontend
from opticnerve_server.types import Phase

REQUEST = pb.EncodeRequest(items=[raw_item(picture(16, 16, seed=i)) for i in range(3)])


async def refusal(stub: pb_grpc.EncoderServiceAsyncStub) -> tuple[str, str, float]:
    """Code, reason and retry hint of a call that is not let in."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Encode(REQUEST))
    retry = details_of(caught.value)["RetryInfo"]
    assert isinstance(retry, error_details_pb2.RetryInfo)
    return caught.value.code().name, reason_of(caught.value), retry.retry_delay.ToMilliseconds() / 1000


async def test_phases_gate_calls_and_info_answers_in_all() -> None:
    async with serving(ready=False) as server:
        await until(lambda: server.frontend.state.model is not None)

        async def info() -> pb.GetServerInfoResponse:
            return await server.stub.GetServerInfo(pb.GetServerInfoRequest())

        assert await refusal(server.stub) == ("UNAVAILABLE", "LOADING", 5)
        first = await info()
        assert (first.phase, first.fingerprint, first.instance_id) == (pb.PHASE_LOADING, "", "instance-1")
        assert first.limits.max_request_bytes == 16 << 20
        assert first.decode_contract["damage"]
        assert list(first.modalities) == [], "not known before the model is"

        server.tell(PhaseChange(Phase.CAPTURING, "7 of 36 graphs"))
        await until(lambda: server.frontend.state.phase is Phase.CAPTURING)
        assert await refusal(server.stub) == ("UNAVAILABLE", "CAPTURING_GRAPHS", 5)
        assert ((await info()).phase, (await info()).phase_detail) == (pb.PHASE_CAPTURING, "7 of 36 graphs")

        server.tell(READY, PhaseChange(Phase.READY), Occupancy(3, 40, 500))
        await server.until_serving()
        await until(lambda: server.frontend.state.occupancy.items == 3)
        ready = await info()
        assert (ready.phase, ready.model, ready.fingerprint) == (pb.PHASE_READY, "tiny", "fp-1")
        assert (ready.architecture, ready.device, ready.attention_backend) == ("fake", "cpu", "sdpa")
        assert [(path.name, list(path.budgets)) for path in ready.paths] == [("default", [64, 128])]
        assert (ready.occupancy.items, ready.occupancy.tokens, ready.occupancy.bytes) == (3, 40, 500)
        assert (ready.layout.hidden, ready.layout.dtype) == (16, pb.DTYPE_BFLOAT16)
        assert len(await collect(server.stub.Encode(REQUEST))) == 3

        server.tell(PhaseChange(Phase.DRAINING))  # the drain delay: not ready, and still at work
        await until(lambda: server.frontend.state.phase is Phase.DRAINING)
        assert (await info()).phase == pb.PHASE_DRAINING
        assert len(await collect(server.stub.Encode(REQUEST))) == 3


async def test_a_young_frontend_of_a_ready_engine_is_loading() -> None:
    gate = threading.Event()

    def slow(config: Config) -> Model:
        assert gate.wait(10)
        return Model("tiny", FakePlanner())

    async with serving(ready=False, open_model=slow) as server:
        server.tell(READY, PhaseChange(Phase.READY))
        await until(lambda: server.frontend.state.ready is not None)
        assert await refusal(server.stub) == ("UNAVAILABLE", "LOADING", 5)
        assert await server.check() == "NOT_SERVING"
        gate.set()
        await server.until_serving()
        assert await asyncio.to_thread(server.control.recv, 100) == encode(FrontendReady())
        assert len(await collect(server.stub.Encode(REQUEST))) == 3


async def test_drain_finishes_what_is_inside_and_refuses_what_is_new() -> None:
    async with serving() as server:
        server.engine.hold_rows = True
        inside = asyncio.create_task(collect(server.stub.Encode(REQUEST)))
        await until(lambda: len(server.engine.held) == 3)
        server.tell(PhaseChange(Phase.DRAINING), Stop(10.0))
        await until(lambda: server.frontend.state.stopping)
        assert await refusal(server.stub) == ("UNAVAILABLE", "DRAINING", 0)
        assert await server.check() == "NOT_SERVING"
        assert not server.run.done()
        server.engine.resume()
        answers = await inside
        assert all(answer.finished for answer in answers.values())
        assert await asyncio.wait_for(server.run, 5) == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(server.stub.Encode(REQUEST))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_grace_is_the_end_of_patience() -> None:
    async with serving() as server:
        server.engine.hold_rows = True
        inside = asyncio.create_task(collect(server.stub.Encode(REQUEST)))
        await until(lambda: len(server.engine.held) == 3)
        server.tell(Stop(0.2))
        assert await asyncio.wait_for(server.run, 5) == 0
        with pytest.raises(grpc.aio.AioRpcError):
            await inside
        server.engine.slots.clear()  # the socket is closed: an engine frees what its front-end held


async def test_engine_death_fails_every_call_and_waits_for_the_supervisor() -> None:
    async with serving() as server:
        server.engine.hold_rows = True
        inside = [asyncio.create_task(collect(server.stub.Encode(REQUEST))) for _ in range(5)]
        await until(lambda: len(server.engine.held) == 15)
        server.engine.die()
        for call in inside:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert reason_of(caught.value) == "GPU_FAULT"
        assert await refusal(server.stub) == ("UNAVAILABLE", "GPU_FAULT", 0)
        names = ("", "opticnerve.v1.EncoderService", "readiness", "liveness")
        assert [await server.check(name) for name in names] == ["NOT_SERVING"] * 4
        assert (await server.stub.GetServerInfo(pb.GetServerInfoRequest())).phase == pb.PHASE_FAILED
        assert not server.run.done()


async def test_without_a_supervisor_it_exits() -> None:
    async with serving(exit_code=1) as server:
        server.control.shutdown(2)
        assert await asyncio.wait_for(server.run, 5) == 1


async def test_a_model_that_does_not_open_ends_the_frontend() -> None:
    def broken(config: Config) -> Model:
        raise ValueError("no such model")

    with pytest.raises(BaseExceptionGroup, match="unhandled errors") as caught:
        async with serving(ready=False, open_model=broken) as server:
            await asyncio.wait({server.run})
    assert caught.group_contains(ValueError, match="no such model")


async def test_it_gives_signs_of_life_from_ready_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend, "BEAT_S", 0.01)
    async with serving() as server:
        heard = [decode(await asyncio.to_thread(server.control.recv, 100)) for _ in range(4)]
    assert heard == [FrontendReady(), *[FrontendAlive()] * 3]


async def lose_a_decoder(server: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """What escapes a callback ends the thread, and nothing but the pool's log says so."""
    gate = threading.Event()
    job = server.frontend._preprocessor._decodes.submit(gate.wait)
    job.add_done_callback(lambda _: sys.exit())
    gate.set()


async def forbid_niceness(server: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first job of every new thread fails, and with it all that come later."""
    monkeypatch.delattr(os, "setpriority")
    answers = await collect(server.stub.Encode(REQUEST))
    assert all(answer.failed for answer in answers.values())


@pytest.mark.parametrize("end", [lose_a_decoder, forbid_niceness])
async def test_a_dead_worker_thread_is_a_dead_frontend(
    end: Callable[[Harness, pytest.MonkeyPatch], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend, "BEAT_S", 0.05)

    async def live() -> None:
        async with serving() as server:
            await end(server, monkeypatch)
            await asyncio.wait({server.run}, timeout=10)

    with pytest.raises(BaseExceptionGroup, match="unhandled errors") as caught:
        await live()
    assert caught.group_contains(RuntimeError, match="worker thread decode_0 has died")


def test_the_port_needs_no_torch() -> None:
    code = "import sys, opticnerve_server.frontend; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_process_of_its_own() -> None:
    """The whole thing with the planner of a real model: spawn, load, encode, drain, exit 0."""
    config = Config(model="preset:qwen3-vl-2b", load_format="dummy", frontends=1, max_queue_bytes=32 << 20)
    engine = FakeEngine(width=4 * 2048, size=config.arena_bytes)
    reserved, address = reserve("127.0.0.1:0")
    with reserved:
        child = Child(
            "frontend-0",
            run_frontend,
            (
                *(config, 0, Child.CONTROL, engine.frontend_end, inherited_fd(engine.arena_fd), address, "instance-2"),
                NOTHING_KNOWN,
            ),
        )
        engine.frontend_end.close()
        child.send(READY)
        child.send(PhaseChange(Phase.READY))
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=60)
            async for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    break
            watch.cancel()
            pixels = picture(256, 320)
            stub: pb_grpc.EncoderServiceAsyncStub = pb_grpc.EncoderServiceStub(channel)  # type: ignore[assignment]
            answers = await collect(stub.Encode(pb.EncodeRequest(items=[raw_item(pixels)]), timeout=30))
        child.send(Stop(5.0))
        assert await asyncio.to_thread(child.wait, 20)
        assert child.process.exitcode == 0
        child.close()
    assert answers[0].started is not None
    assert answers[0].started.plan.tokens == 80
    assert answers[0].started.instance_id == "instance-2"
    assert answers[0].data == rows_of(pixels, 80, 4 * 2048, "bfloat16").tobytes()
    engine.check()
    engine.close()
