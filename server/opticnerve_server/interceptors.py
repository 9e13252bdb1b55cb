"""The border of the service: asks who calls, counts calls, turns every failure into a status of the table."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import code_pb2
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_status import rpc_status

from . import metrics, tracing
from .access import Access, AccessLog, identify
from .auth import TENANT, Tokens
from .errors import ServiceError, internal_error, to_status
from .health import SERVICE
from .info import ServerState, load_report
from .metrics import Rejection
from .telemetry import CALL

DEADLINE_TOLERANCE_S = 0.05
"""At its deadline a caller cancels its call, and may be heard a little before our own clock says that it is time."""

REQUEST_BYTES: ContextVar[int] = ContextVar("request_bytes")
"""Size of the request that is answered. A message would tell its own only by being serialised once more."""

Context = grpc.aio.ServicerContext[Any, Any]
Trailers = tuple[tuple[str, str], ...]
T = TypeVar("T")

_REJECTIONS = {
    "QUEUE_FULL": Rejection.QUEUE_FULL,
    "REQUEST_TOO_LARGE": Rejection.TOO_LARGE,
    "DRAINING": Rejection.DRAINING,
    "LOADING": Rejection.LOADING,
    "CAPTURING_GRAPHS": Rejection.LOADING,
    "TOKEN_MISSING": Rejection.AUTH,
    "TOKEN_INVALID": Rejection.AUTH,
}


def is_expired(time_remaining: float | None) -> bool:
    """Whether a call that was cancelled with so many seconds left ended by its deadline; None: it had none."""
    return time_remaining is not None and time_remaining <= DEADLINE_TOLERANCE_S


class Border(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Wraps the methods of the service. Reflection is for those who may call; health checks pass untouched.

    Requests are parsed here, not by gRPC, which answers UNKNOWN with the name of a class to bytes that are no message.

    Streams are serialised and written here, not by gRPC: rows come as bytes already. Their generator is closed here:
    left to itself, gRPC abandons it at the `yield` when a call is cancelled, and its slots return only when the
    interpreter collects it.
    """

    def __init__(self, state: ServerState, tokens: Tokens | None) -> None:
        self._state = state
        self._tokens = tokens
        self._log = AccessLog()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        service, _, method = handler_call_details.method.removeprefix("/").partition("/")
        if service == HEALTH_SERVICE or handler is None:
            return handler
        if service != SERVICE:
            return self._reflection(handler)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._stream(method, handler))
        return grpc.unary_unary_rpc_method_handler(
            self._unary(method, handler), response_serializer=handler.response_serializer
        )

    def _unary(self, method: str, handler: Any) -> Any:
        async def answer(data: bytes, context: Context, access: Access) -> Any:
            self._admit(context)
            access.request(request := _parsed(handler, data))
            return await handler.unary_unary(request, context)

        async def unary(data: bytes, context: Context) -> Any:
            access = _identified(method, context)
            return await self._guard(context, access, self._in_time(context, answer(data, context, access)))

        return unary

    def _stream(self, method: str, handler: Any) -> Any:
        async def answer(data: bytes, context: Context, access: Access) -> None:
            self._admit(context)
            REQUEST_BYTES.set(len(data))
            access.request(request := _parsed(handler, data))
            await self._write_all(handler, handler.unary_stream(request, context), context, access)

        async def stream(data: bytes, context: Context) -> None:
            access = _identified(method, context)
            await self._guard(context, access, self._in_time(context, answer(data, context, access)))

        return stream

    def _reflection(self, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
        async def answer(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            try:
                self._admit(context)
            except ServiceError as error:
                await _abort(context, error)
            async for response in handler.stream_stream(requests, context):
                yield response

        return grpc.stream_stream_rpc_method_handler(
            answer,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _admit(self, context: Context) -> None:
        """Find out who calls, for the rest of the call's task. Raises ServiceError."""
        if self._tokens is not None:
            TENANT.set(self._tokens.tenant_of(_metadata(context).get("authorization")))

    async def _guard(self, context: Context, access: Access, work: Awaitable[T]) -> T:
        """Await `work`, and end the call with a status of the table if it fails. Whatever the end, it is counted."""
        code, reason = "OK", ""
        try:
            result = await work
            context.set_trailing_metadata(self._trailers())
            return result
        except asyncio.CancelledError:
            code = "DEADLINE_EXCEEDED" if is_expired(context.time_remaining()) else "CANCELLED"
            raise
        except Exception as exception:
            error = exception if isinstance(exception, ServiceError) else internal_error(exception)
            code, reason = code_pb2.Code.Name(error.row.code), error.reason
            if reason in _REJECTIONS:
                metrics.REJECTED.labels(_REJECTIONS[reason]).inc()
            await _abort(context, error, self._trailers())
        finally:
            metrics.REQUESTS.labels(access.method, code).inc()
            metrics.REQUEST_DURATION.labels(access.method).observe(access.seconds())
            self._log.write(access.fields(code, reason))
            tracing.end(code, reason, CALL.get()["request_id"])

    def _trailers(self) -> Trailers:
        """What every answer ends with: the name of the call, and the server's load for whoever balances."""
        return (("x-request-id", CALL.get()["request_id"]), ("endpoint-load-metrics", load_report(self._state)))

    async def _in_time(self, context: Context, work: Awaitable[T]) -> T:
        """A deadline for callers that set none. Others' deadlines gRPC keeps."""
        seconds = self._state.config.default_timeout
        try:
            async with asyncio.timeout(seconds if context.time_remaining() is None else None) as limit:
                return await work
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ServiceError(
                "EXPIRED_IN_QUEUE",
                f"no complete answer within the {seconds:g} s that calls without a deadline have: set a deadline",
                metadata={"default_timeout": f"{seconds:g}"},
            ) from error

    async def _write_all(
        self, handler: Any, responses: AsyncGenerator[Any, None], context: Context, access: Access
    ) -> None:
        seconds = self._state.config.stream_stall_timeout
        async with aclosing(responses):
            async for response in responses:
                if not isinstance(response, bytes):
                    access.response(response)
                    response = handler.response_serializer(response)
                try:
                    async with asyncio.timeout(seconds):
                        await context.write(response)
                except TimeoutError as error:
                    raise ServiceError(
                        "SLOW_READER",
                        f"no message was taken for {seconds:g} s: read answers as they come",
                    ) from error


def _parsed(handler: Any, data: bytes) -> Any:
    try:
        return handler.request_deserializer(data)
    except DecodeError as error:
        raise ServiceError(
            "REQUEST_INVALID",
            f"the {len(data)} bytes of the request are not the message that this method takes: build it with code "
            "generated from opticnerve/v1/encoder.proto",
            subject="request",
        ) from error


def _metadata(context: Context) -> dict[str, str | bytes]:
    return dict(context.invocation_metadata() or ())


def _identified(method: str, context: Context) -> Access:
    """The beginning of a call: from here on what its task logs carries its names."""
    metadata = _metadata(context)
    traced = {"trace_id": trace_id} if (trace_id := tracing.begin(f"{SERVICE}/{method}", metadata)) else {}
    CALL.set({**identify(metadata), **traced})
    return Access(method)


async def _abort(context: Context, error: ServiceError, trailers: Trailers = ()) -> NoReturn:
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, (*(status.trailing_metadata or ()), *trailers))
