"""The health port: grpc.health.v1 and GetServerInfo, from a process that does nothing else.

A threaded server on a port of its own answers a probe within milliseconds while the front-ends are saturated, and still
answers while they drain.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer

from opticnerve.v1 import encoder_pb2 as pb

from .types import Phase

SERVICE = "opticnerve.v1.EncoderService"

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

_THREADS = 4
"""Checks take microseconds, and an open Watch holds no thread."""


def statuses(
    phase: Phase, started: bool, alive: bool = True
) -> dict[str, health_pb2.HealthCheckResponse.ServingStatus]:
    """What each name of the health service answers.

    `started`: the server has been READY once; `alive`: the scheduler gives signs of life. Readiness, the service and
    the server as a whole are one answer; liveness fails only where a restart helps.
    """
    ready = SERVING if phase is Phase.READY else NOT_SERVING
    return {
        "": ready,
        SERVICE: ready,
        "readiness": ready,
        "startup": SERVING if started else NOT_SERVING,
        "liveness": SERVING if alive and phase is not Phase.FAILED else NOT_SERVING,
    }


def _info_handler(info: Callable[[], pb.GetServerInfoResponse]) -> grpc.GenericRpcHandler[Any, Any]:
    """GetServerInfo alone; gRPC answers UNIMPLEMENTED to every other method."""

    def get_server_info(request: pb.GetServerInfoRequest, context: grpc.ServicerContext) -> pb.GetServerInfoResponse:
        return info()

    method = grpc.unary_unary_rpc_method_handler(
        get_server_info,
        request_deserializer=pb.GetServerInfoRequest.FromString,
        response_serializer=pb.GetServerInfoResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(SERVICE, {"GetServerInfo": method})


class HealthServer:
    """Answers from construction on, first with LOADING. `info` is called on a thread of the server."""

    def __init__(self, address: str, info: Callable[[], pb.GetServerInfoResponse]) -> None:
        """Bind `address`, whose port may be 0; raises OSError when it cannot be had."""
        # Without this option a second server would silently share the port.
        self._server = grpc.server(ThreadPoolExecutor(_THREADS, "health"), options=[("grpc.so_reuseport", 0)])
        self._servicer = HealthServicer()
        self.update(Phase.LOADING, started=False)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self._server)
        self._server.add_generic_rpc_handlers((_info_handler(info),))
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot bind {address}") from error
        self.address = f"{address.rpartition(':')[0]}:{port}"
        self._server.start()

    def update(self, phase: Phase, started: bool, alive: bool = True) -> None:
        """Tell every Check from now on, and every open Watch."""
        for name, status in statuses(phase, started, alive).items():
            self._servicer.set(name, status)

    def stop(self) -> None:
        """Close the port and end open Watches."""
        self._server.stop(0).wait()
