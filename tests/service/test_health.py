"""Health and reflection on the service's own port."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from frontend_harness import READY, serving, until
from opticnerve_server.messages import PhaseChange
from opticnerve_server.types import Phase

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
