"""Connections to a server, with the options that users of such a service expect; all gRPC settings are here.

Three defaults of gRPC would hurt: a call is not retried when its request is over 256 KiB, which every photograph is; a
connection that died silently is noticed after hours; a channel sends all its calls to one of several servers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from opticnerve.chunks import RowChunk, unpack
from opticnerve.digests import Metadata
from opticnerve.errors import ProtocolError, ServerError, UnavailableError, from_status
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve.v1 import encoder_pb2_grpc

if TYPE_CHECKING:
    from opticnerve.v1.encoder_pb2_grpc import EncoderServiceAsyncStub

    EncodeCall: TypeAlias = grpc.aio.UnaryStreamCall[pb.EncodeRequest, pb.EncodeResponse | RowChunk]

SERVICE = "opticnerve.v1.EncoderService"

# No "timeout" here: gRPC takes the smaller of it and the caller's own, so it would cut every longer deadline short.
# The default deadline is the client's (`client.DEFAULT_TIMEOUT_S`).
SERVICE_CONFIG: dict[str, Any] = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": SERVICE},
    "methodConfig": [
        {
            "name": [{"service": SERVICE}],
            "waitForReady": True,
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.05s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
    "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
}
"""The service config we ship, equal to `deploy/grpc/service-config.json`."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A request over this is sent once only. The server's own default limit of a request.
    ("grpc.per_rpc_retry_buffer_size", 32 << 20),
)

NUMBER = "opticnerve.channel"
"""An option that gRPC does not know, by which the channels of a client differ."""

MAX_CHANNELS = 8
"""Connections to each server. One leads to one process of the server and never to another, and a process of Python
streams less than a gigabyte a second: callers with many calls at once need several. Those with few have few.
"""

ENDING_S = 1.0
"""How long a client that is closed waits for the end of calls that have been answered."""


@dataclass(frozen=True, slots=True)
class Tls:
    """An encrypted connection. All files are PEM, and read when a connection is made.

    Args:
        ca: the authorities that sign servers' certificates; None for those that gRPC comes with.
        cert, key: certificate chain and key to show to a server that asks for them; both or none.
    """

    ca: str | PathLike[str] | None = None
    cert: str | PathLike[str] | None = None
    key: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("a certificate and its key go together: give cert and key, or neither")

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError for a file that cannot be read."""
        ca, key, cert = (None if path is None else Path(path).read_bytes() for path in (self.ca, self.key, self.cert))
        return grpc.ssl_channel_credentials(ca, key, cert)


class _Channel:
    """One channel and the methods on it."""

    def __init__(self, server: str, options: list[tuple[str, Any]], tls: Tls | None) -> None:
        if tls is None:
            self.channel = grpc.aio.insecure_channel(server, options=options)
        else:
            self.channel = grpc.aio.secure_channel(server, tls.credentials(), options=options)
        self.active: set[EncodeCall] = set()  # whose answers are not all there
        self._ending: set[EncodeCall] = set()  # whose answers are, and the status is not: kept, or they are cancelled
        self._encode = self.channel.unary_stream(
            f"/{SERVICE}/Encode", request_serializer=pb.EncodeRequest.SerializeToString, response_deserializer=unpack
        )

    def encode(self, request: pb.EncodeRequest, timeout: float | None, metadata: Metadata) -> EncodeCall:
        call = self._encode(request, timeout=timeout, metadata=metadata)
        self.active.add(call)
        call.add_done_callback(self._ended)
        return call

    def answered(self, call: EncodeCall) -> None:
        if call in self.active:
            self.active.remove(call)
            self._ending.add(call)

    def _ended(self, call: EncodeCall) -> None:
        self.active.discard(call)
        self._ending.discard(call)

    async def close(self) -> None:
        if self._ending:
            await asyncio.wait([asyncio.create_task(call.code()) for call in self._ending], timeout=ENDING_S)
        await self.channel.close(None)


class Connection:
    """What leads to a server. Belongs to the event loop that runs when it is made.

    With `wait_until_ready`, calls go to servers whose health service says SERVING, and wait for one within their
    deadline. Without it, health is not asked: a call fails at once where no server listens, and reaches a server that
    is still loading, which answers why it refuses.

    `metadata` goes with every call: it carries `token`. `tls` None is plaintext, the token too.
    """

    def __init__(self, server: str, *, wait_until_ready: bool, tls: Tls | None = None, token: str = "") -> None:
        config = dict(SERVICE_CONFIG)
        if not wait_until_ready:
            del config["healthCheckConfig"]
            config["methodConfig"] = [{**method, "waitForReady": False} for method in config["methodConfig"]]
        options = [*CHANNEL_OPTIONS, ("grpc.service_config", json.dumps(config))]
        # Channels with the same options share their connections, those of other clients in this process too.
        self._open: Callable[[int], _Channel] = lambda number: _Channel(server, [*options, (NUMBER, number)], tls)
        self._channels = [self._open(0)]
        self.metadata = (("authorization", f"Bearer {token}"),) if token else ()
        first = self._channels[0].channel
        self.encoder = cast("EncoderServiceAsyncStub", encoder_pb2_grpc.EncoderServiceStub(first))
        self._health = health_pb2_grpc.HealthStub(first)

    def encode(self, request: pb.EncodeRequest, timeout: float | None, affinity: Metadata = ()) -> EncodeCall:
        """A call of Encode, on the channel that has the fewest; while all have one, a new one is opened."""
        channel = min(self._channels, key=lambda channel: len(channel.active))
        if channel.active and len(self._channels) < MAX_CHANNELS:
            channel = self._open(len(self._channels))
            self._channels.append(channel)
        return channel.encode(request, timeout, (*self.metadata, *affinity))

    def answered(self, call: EncodeCall) -> None:
        """All answers of a call of `encode` are there. Its status, which the server sends when it has done its books,
        is not worth the wait; but one that is cancelled before counts on the server as a call that nobody waited for.
        """
        for channel in self._channels:
            channel.answered(call)

    @property
    def is_ready(self) -> bool:
        """Whether a server that takes calls is connected now."""
        return self._channels[0].channel.get_state() is grpc.ChannelConnectivity.READY

    async def check_health(self, service: str, timeout: float | None) -> str:
        """Name of the serving status, such as "NOT_SERVING". Raises grpc.aio.AioRpcError."""
        answer = await self._health.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    async def close(self) -> None:
        """Cancels what is in flight, but for calls whose answers are all there: their end is waited for, a moment."""
        await asyncio.gather(*(channel.close() for channel in self._channels))


def to_server_error(error: grpc.aio.AioRpcError) -> ServerError:
    """The typed error of a failed call, out of its google.rpc.Status where the server sent one."""
    try:
        status = rpc_status.from_call(cast("grpc.Call", error))
    except (ValueError, DecodeError) as broken:
        raise ProtocolError(f"the call failed with {error.code().name}, its details cannot be read") from broken
    if status is None and error.code() is grpc.StatusCode.INTERNAL:
        # Servers say what is internal to them. This is gRPC's word for a stream that a proxy cut off, its server gone.
        return UnavailableError(error.details() or "the stream was reset", code="INTERNAL")
    if status is None:
        status = status_pb2.Status(code=error.code().value[0], message=error.details() or "no message")
    return from_status(status)
