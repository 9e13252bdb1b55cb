"""Who answers a client: the connections there, what was told of its limits, and why a call failed."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import grpc.aio

from opticnerve.channel import Connection, Tls, to_server_error
from opticnerve.errors import DeadlineExceededError, RequestTooLargeError, ResourceExhaustedError, ServerError
from opticnerve.retry import Patience
from opticnerve.v1 import encoder_pb2 as pb

_PHASE_TIMEOUT_S = 1.0  # to learn, after a call failed, what the server was doing

T = TypeVar("T")


class Target:
    """One gRPC target, which may be several servers. Belongs to the event loop of its first call."""

    def __init__(self, name: str, *, tls: Tls | None, token: str) -> None:
        """Connects to nothing yet."""
        self._name = name
        self._tls = tls
        self._token = token
        self._connections: dict[bool, Connection] = {}  # by wait_until_ready
        self._max_request_bytes = 0  # 0 until a server has told it
        self._closed = False

    async def close(self) -> None:
        """Ends the connections; calls in flight are cancelled."""
        self._closed = True
        for connection in self._connections.values():
            await connection.close()

    def connection(self, wait_until_ready: bool) -> Connection:
        """Made when it is first asked for: raises OSError for files of `tls`. RuntimeError once closed."""
        if self._closed:
            raise RuntimeError("the client is closed")
        if wait_until_ready not in self._connections:
            self._connections[wait_until_ready] = Connection(
                self._name, wait_until_ready=wait_until_ready, tls=self._tls, token=self._token
            )
        return self._connections[wait_until_ready]

    async def result(self, call: Awaitable[T], patience: Patience, *, waited: bool) -> T:
        """The answer of a unary call, or its typed error."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise await self.explain(error, patience, waited=waited) from error

    async def explain(
        self, error: grpc.aio.AioRpcError, patience: Patience, *, waited: bool, request_bytes: int = 0
    ) -> ServerError:
        """The typed error of a failed call; asks the server for what gRPC itself does not say.

        `waited`: the call waited for a server to be ready, which hides why none was.
        """
        failure = to_server_error(error)
        if failure.reason:
            return failure
        if isinstance(failure, DeadlineExceededError) or patience.left() == 0:  # a proxy or the server was quicker
            message = f"no complete answer within {patience.timeout:g} s"
            if waited and not self.connection(wait_until_ready=True).is_ready:
                message += f": {await self._describe_server()}"
            return DeadlineExceededError(message, code="DEADLINE_EXCEEDED")
        if isinstance(failure, ResourceExhaustedError) and request_bytes:  # gRPC's own refusal, perhaps of the size
            await self._describe_server()
            return self.oversize(request_bytes) or failure
        return failure

    async def ask_info(self, timeout: float | None) -> pb.GetServerInfoResponse:
        """What a server says of itself, in every phase. Raises grpc.aio.AioRpcError."""
        connection = self.connection(wait_until_ready=False)
        info = await connection.encoder.GetServerInfo(
            pb.GetServerInfoRequest(), timeout=timeout, metadata=connection.metadata
        )
        self._max_request_bytes = info.limits.max_request_bytes
        return info

    def oversize(self, request_bytes: int) -> RequestTooLargeError | None:
        """The error of a request with more bytes than the server takes, None while it has not told how many."""
        if request_bytes <= self._max_request_bytes or not self._max_request_bytes:
            return None
        return RequestTooLargeError(
            f"the request has {request_bytes} bytes, the server takes {self._max_request_bytes}: send fewer items a "
            "call, or raise its --max-request-bytes",
            code="INVALID_ARGUMENT",
            reason="REQUEST_TOO_LARGE",
        )

    async def _describe_server(self) -> str:
        """The phase of the server, for people."""
        try:
            info = await self.ask_info(_PHASE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return f"no server answers at {self._name}"
        phase = pb.Phase.Name(info.phase).removeprefix("PHASE_")
        return f"the server at {self._name} is {phase} {info.phase_detail}".rstrip()
