"""The HTTP routes that SGLang calls of an encoder."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from opticnerve.errors import OpticnerveError, RequestInvalidError, RequestTooLargeError
from opticnerve.integrations.sglang.encoder import Encoder, EncodeRequest, status_of

_REQ_ID = web.RequestKey("req_id", str)

T = TypeVar("T", bound="EncodeBody | ReceiveBody")


class EncodeBody(msgspec.Struct):
    """Of POST /encode; what else SGLang writes there is for its own encoder."""

    req_id: str
    num_parts: int
    part_idx: int
    modality: str
    mm_items: list[Any]
    prefill_host: str | None = None
    embedding_port: int | list[int] | None = None  # null: the receivers tell by themselves


class ReceiveBody(msgspec.Struct):
    """Of POST /scheduler_receive_url."""

    req_id: str
    receive_count: int
    receive_url: str  # host:port


def application(encoder: Encoder, max_body_bytes: int) -> web.Application:
    """The routes. Their runner should cancel handlers whose callers are gone."""

    async def encode(request: web.Request) -> web.Response:
        with encoder.place():
            body = await _read(request, EncodeBody)
            await encoder.encode(_asked(body, request.remote or ""))
        return web.json_response(None)

    async def receive(request: web.Request) -> web.Response:
        body = await _read(request, ReceiveBody)
        await encoder.tell(body.req_id, body.receive_url, body.receive_count, request.remote or "")
        return web.json_response(None)

    async def health(request: web.Request) -> web.Response:
        return web.Response(status=200 if await encoder.serving() else 503)

    app = web.Application(middlewares=[_errors], client_max_size=max_body_bytes)
    app.add_routes(
        [
            web.post("/encode", encode),
            web.post("/scheduler_receive_url", receive),
            web.get("/health", health),
            web.get("/health_generate", health),
        ]
    )
    return app


def _asked(body: EncodeBody, caller: str) -> EncodeRequest:
    ports = body.embedding_port
    return EncodeRequest(
        req_id=body.req_id,
        num_parts=body.num_parts,
        part_idx=body.part_idx,
        modality=body.modality,
        items=body.mm_items,
        host=body.prefill_host or "",
        ports=ports if isinstance(ports, list) else [] if ports is None else [ports],
        caller=caller,
    )


async def _read(request: web.Request, type: type[T]) -> T:
    """The body. Raises RequestTooLargeError and RequestInvalidError."""
    try:
        body = msgspec.json.decode(await request.read(), type=type)
    except web.HTTPRequestEntityTooLarge as error:
        message = "the body is larger than the service takes: send fewer items, or raise its --max-request-bytes"
        raise RequestTooLargeError(message, code="INVALID_ARGUMENT") from error
    except msgspec.DecodeError as error:
        raise RequestInvalidError(f"the body is not understood: {error}", code="INVALID_ARGUMENT") from error
    request[_REQ_ID] = body.req_id
    return body


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """What went wrong, as SGLang reads it."""
    try:
        return await handler(request)
    except OpticnerveError as error:
        answer = {"status": "error", "message": str(error), "req_id": request.get(_REQ_ID)}
        return web.json_response(answer, status=status_of(error))
