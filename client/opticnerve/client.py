"""The client: its calls. `sync.py` has the same without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, cast, overload

import grpc.aio

from opticnerve.channel import SERVICE, Tls
from opticnerve.digests import Metadata, affinity_of
from opticnerve.errors import ImageInvalidError, NotFoundError, ProtocolError, ServerError, from_item
from opticnerve.media import MediaSource, SizeSource, to_items, to_media_size
from opticnerve.retry import Patience
from opticnerve.target import Target
from opticnerve.tensors import DtypeName, Embedding, Held, ItemPlan, Receiver, to_wire_dtype
from opticnerve.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    from opticnerve.chunks import RowChunk

DEFAULT_SERVER = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 30.0

_LIGHT_BYTES = 128 << 10
"""Files in memory, together, that become a request where they are: their digest takes 0.1 ms, a thread 0.3."""

_HEADER_BYTES = 64 << 10  # first bytes of a file: enough to know the size of almost every image


class AsyncClient:
    """Calls Opticnerve servers. Belongs to the event loop of its first call; its calls may run concurrently.

    Args:
        server: gRPC target, such as "host:port" or "dns:///name:port". Calls are spread over its addresses.
        timeout: seconds for each call that names none, retries included; math.inf for no deadline.
        wait_until_ready: True lets `encode` and `plan` wait, within their deadline, for a server that is ready. False
            fails with the reason: UnavailableError where nothing listens, LoadingError, CapturingGraphsError and so on.
        model: refuse servers of another model (ModelNotLoadedError); "" takes any.
        fingerprint: refuse to encode where embeddings do not fit this one (FingerprintMismatchError); "" takes any.
        tls: how to encrypt; None for plaintext. Raises OSError, in the first call, for files that cannot be read.
        token: bearer token for servers that ask for one.

    Every call raises ServerError, by leaf (`opticnerve.errors`), and ProtocolError.
    """

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        wait_until_ready: bool = True,
        model: str = "",
        fingerprint: str = "",
        tls: Tls | None = None,
        token: str = "",
    ) -> None:
        self._target = Target(server, tls=tls, token=token)
        self._timeout = timeout
        self._wait_until_ready = wait_until_ready
        self._model = model
        self._fingerprint = fingerprint

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connections; calls in flight are cancelled."""
        await self._target.close()

    @overload
    def encode(
        self,
        items: Iterable[MediaSource],
        *,
        dtype: DtypeName = ...,
        timeout: float | None = ...,
        return_errors: Literal[False] = ...,
    ) -> AsyncGenerator[Embedding, None]: ...

    @overload
    def encode(
        self, items: Iterable[MediaSource], *, dtype: DtypeName = ..., timeout: float | None = ..., return_errors: bool
    ) -> AsyncGenerator[Embedding | ServerError, None]: ...

    async def encode(
        self,
        items: Iterable[MediaSource],
        *,
        dtype: DtypeName = "bfloat16",
        timeout: float | None = None,
        return_errors: bool = False,
    ) -> AsyncGenerator[Embedding | ServerError, None]:
        """Yields the embedding of each item, in the order of the items, as soon as it and those before it are there.

        The call starts with the first step, and is cancelled when the iterator is closed. An item that fails raises its
        error in its turn; with `return_errors` the error is yielded in its place, and the others follow. Items whose
        stream broke (UNAVAILABLE) are sent again, at most three times, without those that are finished; a full queue
        (QUEUE_FULL) is tried again when the server says, for as long as `timeout` lasts. A call for one item carries
        its digest as metadata (`digests.DIGEST_HEADER`), by which proxies can send equal items to one server.

        Raises besides: ValueError, TypeError or OSError, before anything is sent, for what cannot be sent;
        RequestTooLargeError likewise, once the limit is known (`info` tells it, and so does the first refusal).
        """
        patience = self._patience(timeout)
        request, affinity = await self._request(items, dtype)
        early: dict[int, Embedding | Held | ServerError] = {}
        turn = 0
        async with aclosing(self._answers(request, affinity, dtype, patience)) as answers:
            async for index, arrived in answers:
                early[index] = arrived
                while turn in early:
                    answer = early.pop(turn)
                    turn += 1
                    if isinstance(answer, ServerError) and not return_errors:
                        raise answer
                    assert not isinstance(answer, Held)
                    yield answer

    @overload
    async def hold(
        self,
        items: Iterable[MediaSource],
        *,
        ttl: float | None = ...,
        reads: int = ...,
        dtype: DtypeName = ...,
        timeout: float | None = ...,
        return_errors: Literal[False] = ...,
    ) -> list[Held]: ...

    @overload
    async def hold(
        self,
        items: Iterable[MediaSource],
        *,
        ttl: float | None = ...,
        reads: int = ...,
        dtype: DtypeName = ...,
        timeout: float | None = ...,
        return_errors: bool,
    ) -> list[Held | ServerError]: ...

    async def hold(
        self,
        items: Iterable[MediaSource],
        *,
        ttl: float | None = None,
        reads: int = 0,
        dtype: DtypeName = "bfloat16",
        timeout: float | None = None,
        return_errors: bool = False,
    ) -> list[Any]:
        """Lets the server encode `items` and keep their rows under leases; returns as soon as all are planned.

        Whoever has an item's digest fetches its rows with `encode([Digest(held.digest)])` and the same `dtype`, at
        `held.address`; a fetch waits for what is still being encoded. A lease lasts `ttl` seconds (None: as long as the
        server likes), or until `reads` fetches took all rows, where that is not 0; `release` ends it early.

        Errors are those of `encode`; StoreFullError where the server cannot promise more. An item that turns out to be
        broken while it is encoded is not known here: its fetches fail with NotCachedError.
        """
        patience = self._patience(timeout)
        request, affinity = await self._request(items, dtype)
        request.delivery.hold.reads = reads
        if ttl is not None:
            request.delivery.hold.ttl.FromNanoseconds(round(ttl * 1e9))
        answers: dict[int, Embedding | Held | ServerError] = {}
        async with aclosing(self._answers(request, affinity, dtype, patience)) as arriving:
            async for index, answer in arriving:
                if isinstance(answer, ServerError) and not return_errors:
                    raise answer
                answers[index] = answer
        return [answers[index] for index in range(len(request.items))]

    async def release(self, digests: Iterable[bytes], *, timeout: float | None = None) -> int:
        """Ends a lease on the rows of each of `digests`; returns how many there were.

        Behind a proxy that balances by digest, name one digest a call: several are asked of one server.
        """
        patience = self._patience(timeout)
        request = pb.ReleaseRequest(digests=digests)
        connection = self._target.connection(self._wait_until_ready)
        affinity = affinity_of([pb.Item(digest=pb.Digest(sha256=digest)) for digest in request.digests])
        call = connection.encoder.Release(request, timeout=patience.left(), metadata=(*connection.metadata, *affinity))
        return (await self._target.result(call, patience, waited=self._wait_until_ready)).released

    @overload
    async def plan(
        self, sizes: Iterable[SizeSource], *, timeout: float | None = ..., return_errors: Literal[False] = ...
    ) -> list[ItemPlan]: ...

    @overload
    async def plan(
        self, sizes: Iterable[SizeSource], *, timeout: float | None = ..., return_errors: bool
    ) -> list[ItemPlan | ServerError]: ...

    async def plan(
        self, sizes: Iterable[SizeSource], *, timeout: float | None = None, return_errors: bool = False
    ) -> list[Any]:
        """What `encode` would answer for media of these sizes, in their order, without pixels and without the device.

        A size is `(height, width)` of an image in pixels, an image file, of which only the first bytes are sent, or the
        VideoSize of a video, which must be known: a file's first bytes do not tell it. An item that
        `encode` would refuse raises its error; with `return_errors` the error is in its place.
        """
        patience = self._patience(timeout)
        sources = list(sizes)
        answers: dict[int, ItemPlan | ServerError] = {}
        asked = dict.fromkeys(range(len(sources)), _HEADER_BYTES)
        while asked:
            request = pb.PlanItemsRequest(model=self._model)
            for index, header_bytes in asked.items():
                request.items.append(await asyncio.to_thread(to_media_size, sources[index], header_bytes, index))
            connection = self._target.connection(self._wait_until_ready)
            call = connection.encoder.PlanItems(request, timeout=patience.left(), metadata=connection.metadata)
            response = await self._target.result(call, patience, waited=self._wait_until_ready)
            if len(response.items) != len(asked):
                raise ProtocolError(f"the server answers {len(response.items)} of {len(asked)} sizes")
            again = {}
            for (index, header_bytes), size, planned in zip(asked.items(), request.items, response.items, strict=True):
                answer = _read_planned(planned, size, header_bytes, index)
                if isinstance(answer, int):
                    again[index] = answer
                elif isinstance(answer, ServerError) and not return_errors:
                    raise answer
                else:
                    answers[index] = answer
            asked = again
        return [answers[index] for index in range(len(sources))]

    async def info(self, *, timeout: float | None = None) -> pb.GetServerInfoResponse:
        """The server's description of itself, in every phase, as the wire message. Does not wait for a server."""
        patience = self._patience(timeout)
        return await self._target.result(self._target.ask_info(patience.left()), patience, waited=False)

    async def health(self, service: str = "", *, timeout: float | None = None) -> str:
        """Status of one service, "" for the whole server: "SERVING", "NOT_SERVING". Does not wait for a server.

        Raises NotFoundError for a service that the server does not have.
        """
        patience = self._patience(timeout)
        connection = self._target.connection(wait_until_ready=False)
        try:
            return await self._target.result(connection.check_health(service, patience.left()), patience, waited=False)
        except NotFoundError as error:
            raise NotFoundError(
                f"the server's health has no name {service!r}: ask for {SERVICE}, readiness, startup or liveness, or "
                "for none, which is the whole server",
                code=error.code,
            ) from error

    def _patience(self, timeout: float | None) -> Patience:
        return Patience(self._timeout if timeout is None else timeout)

    async def _request(self, items: Iterable[MediaSource], dtype: DtypeName) -> tuple[pb.EncodeRequest, Metadata]:
        """The request of a call and where it would rather go. Raises what `encode` raises before anything is sent."""
        request = pb.EncodeRequest(model=self._model, fingerprint=self._fingerprint, dtype=to_wire_dtype(dtype))

        def fill() -> Metadata:
            request.items.extend(to_items(items))
            return affinity_of(request.items)

        if _is_light(items):
            affinity = fill()
        else:
            affinity = await asyncio.to_thread(fill)  # files are read and digests made there, in one wake-up
        if oversize := self._target.oversize(request.ByteSize()):
            raise oversize
        return request, affinity

    async def _answers(
        self, request: pb.EncodeRequest, affinity: Metadata, dtype: str, patience: Patience
    ) -> AsyncGenerator[tuple[int, Embedding | Held | ServerError], None]:
        """Yields index and answer of each item as it finishes; sends the unanswered again when that may help."""
        unanswered = dict(enumerate(request.items))
        while unanswered:
            sent = list(unanswered)
            try:
                receiver = Receiver(sent, dtype, held=request.delivery.HasField("hold"))
                async with aclosing(self._attempt(request, affinity, receiver, patience)) as answers:
                    async for index, answer in answers:
                        del unanswered[index]
                        yield index, answer
            except grpc.aio.AioRpcError as error:
                if not unanswered:
                    return  # the stream broke behind its last item
                failure = await self._target.explain(
                    error, patience, waited=self._wait_until_ready, request_bytes=request.ByteSize()
                )
                pause = patience.pause(failure)
                if pause is None:
                    raise failure from error
                await asyncio.sleep(pause)
            if len(unanswered) < len(sent):
                request = pb.EncodeRequest(
                    model=request.model,
                    fingerprint=request.fingerprint,
                    items=unanswered.values(),
                    dtype=request.dtype,
                    delivery=request.delivery if request.HasField("delivery") else None,
                )

    async def _attempt(
        self, request: pb.EncodeRequest, affinity: Metadata, receiver: Receiver, patience: Patience
    ) -> AsyncGenerator[tuple[int, Embedding | Held | ServerError], None]:
        connection = self._target.connection(self._wait_until_ready)
        call = connection.encode(request, patience.left(), affinity)
        try:
            while not receiver.is_complete:
                # Not `async for`: gRPC's iterator, left before its end, keeps call and request as cyclic garbage.
                message = await call.read()
                if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # stubs lack it
                    receiver.close()
                    return
                answer = receiver.receive(cast("pb.EncodeResponse | RowChunk", message))
                if answer is not None:
                    yield answer
        finally:
            if receiver.is_complete:
                connection.answered(call)
            else:
                call.cancel()


def _is_light(items: Iterable[MediaSource]) -> bool:
    """Whether these are files in memory of so few bytes that handling them holds the event loop up for no time."""
    if not isinstance(items, list | tuple) or not all(isinstance(item, bytes) for item in items):
        return False
    return sum(map(len, items)) <= _LIGHT_BYTES


def _read_planned(
    planned: pb.PlannedItem, size: pb.MediaSize, header_bytes: int, index: int
) -> ItemPlan | ServerError | int:
    """The answer for one size, of whose file `header_bytes` were to be sent; an int is how many the server needs."""
    result = planned.WhichOneof("result")
    if result == "plan":
        return ItemPlan.from_wire(planned.plan)
    if result == "failed":
        return from_item(planned.failed, index)
    sent = len(size.header)
    if result != "need_bytes" or size.WhichOneof("source") != "header" or planned.need_bytes <= sent:
        raise ProtocolError(f"size {index}: the server answers {result or 'nothing'} to {sent} header bytes")
    if sent < header_bytes:
        ends = f"ends after {sent} bytes, before its size is known" if sent else "is empty"
        message = f"the image file {ends}: give the whole file"
        return ImageInvalidError(message, code="INVALID_ARGUMENT", reason="IMAGE_INVALID", index=index)
    return planned.need_bytes
