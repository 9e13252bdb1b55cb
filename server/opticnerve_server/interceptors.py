"""The border of the service: asks who calls, counts calls, turns every failure into a status of the table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import code_pb2
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_status import rpc_status

from . import metrics
from .auth import TENANT, Tokens
from .config import Config
from .errors import ServiceError, internal_error, to_status
from .health import SERVICE
from .metrics import Rejection

DEADLINE_TOLERANCE_S = 0.05
"""At its deadline a caller cancels its call, and may be heard a little before our own clock says that it is time."""

Context = grpc.aio.ServicerContext[Any, Any]
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

    Streams are written here, not by gRPC, and their generator is closed here: left to itself, gRPC abandons it at the
    `yield` when a call is cancelled, and its slots return only when the interpreter collects it.
    """

    def __init__(self, config: Config, tokens: Tokens | None) -> None:
        self._config = config
        self._tokens = tokens

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
            return grpc.unary_stream_rpc_method_handler(
                self._stream(method, handler), response_serializer=handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(method, handler), response_serializer=handler.response_serializer
        )

    def _unary(self, method: str, handler: Any) -> Any:
        async def answer(data: bytes, context: Context) -> Any:
            self._admit(context)
            return await handler.unary_unary(_parsed(handler, data), context)

        async def unary(data: bytes, context: Context) -> Any:
            return await _guard(method, context, self._in_time(context, answer(data, context)))

        return unary

    def _stream(self, method: str, handler: Any) -> Any:
        async def answer(data: bytes, context: Context) -> None:
            self._admit(context)
            await self._write_all(handler.unary_stream(_parsed(handler, data), context), context)

        async def stream(data: bytes, context: Context) -> None:
            await _guard(method, context, self._in_time(context, answer(data, context)))

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
            TENANT.set(self._tokens.tenant_of(dict(context.invocation_metadata() or ()).get("authorization")))

    async def _in_time(self, context: Context, work: Awaitable[T]) -> T:
        """A deadline for callers that set none. Others' deadlines gRPC keeps."""
        seconds = self._config.default_timeout
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

    async def _write_all(self, responses: AsyncGenerator[Any, None], context: Context) -> None:
        seconds = self._config.stream_stall_timeout
        async with aclosing(responses):
            async for response in responses:
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


async def _guard(method: str, context: Context, work: Awaitable[T]) -> T:
    """Await `work`, and end the call with a status of the table if it fails."""
    started = time.monotonic()
    code = "OK"
    try:
        return await work
    except asyncio.CancelledError:
        code = "DEADLINE_EXCEEDED" if is_expired(context.time_remaining()) else "CANCELLED"
        raise
    except Exception as exception:
        error = exception if isinstance(exception, ServiceError) else internal_error(exception)
        if error.reason in _REJECTIONS:
            metrics.REJECTED.labels(_REJECTIONS[error.reason]).inc()
        code = code_pb2.Code.Name(error.row.code)
        await _abort(context, error)
    finally:
        metrics.REQUESTS.labels(method, code).inc()
        metrics.REQUEST_DURATION.labels(method).observe(time.monotonic() - started)


async def _abort(context: Context, error: ServiceError) -> NoReturn:
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
