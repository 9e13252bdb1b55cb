"""Health and reflection on the service's own port."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from frontend_harness import READY, collect, picture, raw_item, serving, until
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve_server.health import NOT_SERVING, SERVING, HealthServer
from opticnerve_server.messages import PhaseChange
from opticnerve_server.types import Phase
from running_server import eventually

NAMES = ("", "opticnerve.v1.EncoderService", "readiness", "startup")


async def test_names_follow_the_phase() -> None:
    async with serving(ready=False) as server:
        assert [await server.check(name) for name in NAMES] == ["NOT_SERVING"] * 4
        assert await server.check("liveness") == "SERVING", "a restart would not help a server that loads"
        server.tell(READY, PhaseChange(Phase.READY))
        await server.until_serving()
        assert [await server.check(name) for name in NAMES] == ["SERVING"] * 4
        server.tell(PhaseChange(Phase.DRAINING))
        await until(lambda: server.frontend.state.phase is Phase.DRAINING)
        assert [await server.check(name) for name in NAMES] == ["NOT_SERVING"] * 3 + ["SERVING"]


async def test_unknown_names() -> None:
    async with serving() as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.check("no.such.Service")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watch_is_one_long_call() -> None:
    statuses: list[int] = []

    async def watch(channel: grpc.aio.Channel) -> None:
        async for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
            statuses.append(answer.status)

    serving_, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with serving(ready=False) as server:
        watching = asyncio.create_task(watch(server.channel))
        await until(lambda: statuses == [not_serving])
        server.tell(READY, PhaseChange(Phase.CAPTURING, "1 of 2 graphs"), PhaseChange(Phase.READY))
        await until(lambda: statuses == [not_serving, serving_])
        server.tell(PhaseChange(Phase.DRAINING))
        await until(lambda: statuses == [not_serving, serving_, not_serving])
        await asyncio.sleep(0.2)
        assert not watching.done()
        watching.cancel()


async def test_reflection_lists_the_services() -> None:
    async with serving(ready=False) as server:
        stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([request])):
            names = {service.name for service in answer.list_services_response.service}
    assert names == {
        "opticnerve.v1.EncoderService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


async def test_hurried_probes_amid_work_hurt_nothing() -> None:
    items = [raw_item(picture(16, 16, seed)) for seed in range(4)]
    async with serving() as server:
        server.engine.hold_rows = True
        calls = [asyncio.create_task(collect(server.stub.Encode(pb.EncodeRequest(items=items)))) for _ in range(4)]
        await until(lambda: len(server.engine.held) == 16)
        stub = health_pb2_grpc.HealthStub(server.channel)
        probes = [stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=0.01) for _ in range(300)]
        ends = await asyncio.gather(*probes, return_exceptions=True)
        expired = [end for end in ends if isinstance(end, grpc.aio.AioRpcError)]
        assert {error.code() for error in expired} <= {grpc.StatusCode.DEADLINE_EXCEEDED}
        server.engine.resume()
        for answers in await asyncio.gather(*calls):
            assert all(answer.finished is not None for answer in answers.values())
        assert await server.check("liveness") == "SERVING"


async def test_connections_that_say_nothing_or_nonsense_leave_nothing() -> None:
    words = (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", os.urandom(1000))
    async with serving() as server:
        assert await server.check() == "SERVING"
        before = open_files()
        connections = []
        for number in range(200):
            _, writer = await asyncio.open_connection(*server.address.split(":"))
            writer.write(words[number % len(words)])
            connections.append(writer)
        assert await server.check() == "SERVING"
        assert open_files() > before
        for writer in connections:
            writer.close()
        await until(lambda: open_files() <= before)
        assert await server.check() == "SERVING"


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def memory_mib() -> float:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) / 1024


def test_a_flood_of_probes_and_connections_leaves_nothing() -> None:
    server = HealthServer("127.0.0.1:0", pb.GetServerInfoResponse)
    own_connection = [("grpc.use_local_subchannel_pool", 1)]

    def flood(connections: int) -> None:
        for _ in range(connections):
            with grpc.insecure_channel(server.address, own_connection) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                watch = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
                assert next(watch).status == NOT_SERVING
                for _ in range(10):
                    assert stub.Check(health_pb2.HealthCheckRequest(service="liveness")).status == SERVING

    def growth_mib() -> float:
        memory = memory_mib()
        flood(60)
        return memory_mib() - memory

    try:
        flood(60)
        before = open_files()
        # What leaks grows each time; what other tests left in this process moves its memory now and then.
        assert min(growth_mib() for _ in range(4)) < 0.5
        eventually(lambda: open_files() <= before)
    finally:
        server.stop()
