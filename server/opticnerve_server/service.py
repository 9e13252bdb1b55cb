"""The service: from a request to the stream of its answers. Each stage of the path is a call from here.

Runs on the asyncio loop of a front-end. Everything that goes wrong is raised as ServiceError, or ends an item as one.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

import grpc.aio
from google.rpc import code_pb2

from opticnerve.v1 import encoder_pb2 as pb
from opticnerve.v1 import encoder_pb2_grpc as pb_grpc

from . import metrics, wire
from .admission import Admission, AdmittedItem, Answers
from .config import MAX_QUEUE_ITEMS
from .errors import Scope, ServiceError, internal_error, to_item_failed
from .info import Model, ServerState, server_info
from .interceptors import is_expired
from .messages import ItemRequest, Rows
from .metrics import Result, Stage
from .models.base import Planner
from .preprocess import NeedBytes, PlannedItem, Preprocessor
from .stream import MAX_CHUNK_BYTES, RowStream
from .types import ROW_BYTES, Dispatched, ItemPlan

MAX_VIDEOS = 32
"""Videos in one call: each is read from end to end before it is admitted, and has a plan of up to 2048 frames."""


@dataclass(frozen=True, slots=True)
class _Options:
    """What holds for all items of a call."""

    model: Model
    dtype: str
    max_chunk_bytes: int
    arrived: float
    deadline: float  # time.monotonic(); infinity when the caller set none

    @property
    def planner(self) -> Planner:
        return self.model.planner

    @property
    def row_bytes(self) -> int:
        return self.planner.layout.width * ROW_BYTES[self.dtype]

    def needs(self, planned: PlannedItem) -> ItemRequest:
        """What an item needs to be admitted."""
        plan = planned.plan
        return ItemRequest(plan.tokens, planned.message.ByteSize(), plan.pixel_bytes, plan.tokens * self.row_bytes)


@dataclass(slots=True)
class _Item:
    """One admitted item on its way."""

    planned: PlannedItem
    admitted: AdmittedItem
    seconds: dict[str, float]  # by stage
    digest: bytes = b""
    rows: Answers = field(default_factory=asyncio.Queue)
    ready_at: float = 0.0  # time.monotonic() of the first rows

    def add(self, rows: Rows | ServiceError, ready: asyncio.Queue[_Item]) -> None:
        """Rows to stream, or why there are no more; with the first of these the item is `ready`."""
        self.rows.put_nowait(rows)
        if not self.ready_at:
            self.ready_at = time.monotonic()
            ready.put_nowait(self)


class EncoderService(pb_grpc.EncoderServiceServicer):
    """The servicer. `idle` is set while no Encode is inside."""

    def __init__(self, state: ServerState, admission: Admission, preprocessor: Preprocessor) -> None:
        self.idle = asyncio.Event()
        self.idle.set()
        self._active = 0
        self._state = state
        self._admission = admission
        self._preprocessor = preprocessor

    async def GetServerInfo(
        self,
        request: pb.GetServerInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetServerInfoRequest, pb.GetServerInfoResponse],
    ) -> pb.GetServerInfoResponse:
        return server_info(self._state, self._state.shown_phase)

    async def Release(
        self,
        request: pb.ReleaseRequest,
        context: grpc.aio.ServicerContext[pb.ReleaseRequest, pb.ReleaseResponse],
    ) -> pb.ReleaseResponse:
        raise ServiceError("UNIMPLEMENTED", "nothing is held yet, so there is nothing to release")

    async def PlanItems(
        self,
        request: pb.PlanItemsRequest,
        context: grpc.aio.ServicerContext[pb.PlanItemsRequest, pb.PlanItemsResponse],
    ) -> pb.PlanItemsResponse:
        model, engine = self._state.require_model()
        _check_model(request.model, model)
        _check_count(len(request.items), MAX_QUEUE_ITEMS)
        _check_videos(sum(item.WhichOneof("source") == "size" and item.size.frames > 0 for item in request.items))
        plans = await self._preprocessor.plan_sizes(model.planner, request.items)
        return pb.PlanItemsResponse(
            items=[_planned_message(plan) for plan in plans],
            layout=wire.layout_message(model.planner.layout, wire.DTYPES[pb.DTYPE_UNSPECIFIED]),
            fingerprint=engine.fingerprint,
        )

    async def Encode(
        self,
        request: pb.EncodeRequest,
        context: grpc.aio.ServicerContext[pb.EncodeRequest, pb.EncodeResponse],
    ) -> AsyncIterator[pb.EncodeResponse]:
        options = self._options(request, context.time_remaining())
        with self._counted():
            plans = await self._preprocessor.plan_items(options.planner, request.items)
            planned = [plan for plan in plans if isinstance(plan, PlannedItem)]
            refused = {index: plan for index, plan in enumerate(plans) if isinstance(plan, ServiceError)}
            # Nothing is sent before admission: after its first message a call is not retried by the channel.
            async with self._admission.reserve({plan.index: options.needs(plan) for plan in planned}) as admitted:
                admit = time.monotonic() - options.arrived
                items = [
                    _Item(plan, its_slot, {Stage.ADMIT: admit})
                    for plan, its_slot in zip(planned, admitted, strict=True)
                ]
                async with aclosing(self._answers(options, refused, items)) as answers:
                    async for answer in answers:
                        yield answer

    def _options(self, request: pb.EncodeRequest, time_remaining: float | None) -> _Options:
        """Everything that can be said of a call without looking at its items. Raises ServiceError."""
        now = time.monotonic()
        model, engine = self._state.require_model()
        _check_model(request.model, model)
        if request.fingerprint not in ("", engine.fingerprint):
            raise ServiceError(
                "FINGERPRINT_MISMATCH",
                "encoder and decoder do not agree on weights, processor or layout: deploy the same model to both",
                subject=request.fingerprint,
                metadata={"expected": request.fingerprint, "fingerprint": engine.fingerprint},
            )
        _check_count(len(request.items), self._state.config.max_queue_items)
        _check_videos(sum(item.WhichOneof("media") in ("encoded_video", "frame_list") for item in request.items))
        if request.dtype not in wire.DTYPES:
            known = ", ".join(pb.Dtype.Name(number) for number in wire.DTYPES if number)  # type: ignore[arg-type]
            raise _invalid("dtype", f"dtype {request.dtype} is unknown: use one of {known}")
        if request.max_chunk_bytes > MAX_CHUNK_BYTES:
            raise _invalid(
                "max_chunk_bytes",
                f"max_chunk_bytes is {request.max_chunk_bytes}, at most {MAX_CHUNK_BYTES} is allowed: "
                "leave it at 0 for the largest",
            )
        if request.delivery.WhichOneof("mode") == "hold":
            raise ServiceError("UNIMPLEMENTED", "delivery.hold is not built yet: use delivery.stream")
        return _Options(
            model=model,
            dtype=wire.DTYPES[request.dtype],
            max_chunk_bytes=request.max_chunk_bytes or MAX_CHUNK_BYTES,
            arrived=now,
            deadline=math.inf if time_remaining is None else now + time_remaining,
        )

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._active += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self.idle.set()

    async def _answers(
        self, options: _Options, refused: dict[int, ServiceError], items: list[_Item]
    ) -> AsyncGenerator[pb.EncodeResponse, None]:
        """The answers of all items in the order of their first rows. However this is left, no task stays behind."""
        ready: asyncio.Queue[_Item] = asyncio.Queue()  # bounded by the call's items
        tasks = [asyncio.create_task(self._encode(options, item, ready)) for item in items]
        waiting = len(refused) + len(items)
        try:
            for index, error in refused.items():
                yield pb.EncodeResponse(item_index=index, failed=to_item_failed(error))
                waiting -= _count(_result(error))
            for _ in items:
                async with aclosing(self._answer(options, await ready.get())) as answers:
                    async for answer in answers:
                        yield answer
                waiting -= 1
        except BaseException as error:
            _count(_result(error, expired=is_expired(options.deadline - time.monotonic())), waiting)
            raise
        finally:
            for task in tasks:
                task.cancel()

    async def _encode(self, options: _Options, item: _Item, ready: asyncio.Queue[_Item]) -> None:
        """From the grant to the last rows in the slot. The item is ready with its first rows, or with its failure."""
        started = time.monotonic()
        try:
            job = self._preprocessor.prepare(
                options.planner, item.planned, item.admitted.pixels, lambda: not item.admitted.is_released
            )
            item.admitted.written_by(job)
            item.digest = await asyncio.wrap_future(job)
            item.seconds[Stage.PREPROCESS] = time.monotonic() - started
            async for rows in item.admitted.encode(item.planned.plan, options.dtype, options.deadline):
                item.add(rows, ready)
        except Exception as error:
            item.add(error if isinstance(error, ServiceError) else internal_error(error), ready)

    async def _answer(self, options: _Options, item: _Item) -> AsyncGenerator[pb.EncodeResponse, None]:
        """All messages of an item. Its slot is released when the transport has taken the last row that there is."""
        index, plan = item.planned.index, item.planned.plan
        stream = RowStream(index, item.admitted.rows, options.row_bytes, options.max_chunk_bytes)
        dispatches: list[Dispatched] = []
        sent = 0
        while sent < plan.tokens:
            rows = await item.rows.get()
            if isinstance(rows, ServiceError):
                item.admitted.release()
                if rows.row.scope is Scope.CALL:
                    raise rows
                yield pb.EncodeResponse(item_index=index, failed=to_item_failed(rows))
                _count(_result(rows))
                return
            if not sent:
                yield self._started(options, item)
                item.seconds |= {Stage.QUEUE: rows.queue_s, Stage.EXECUTE: rows.execute_s, Stage.COPY: rows.copy_s}
            for chunk in stream.chunks(rows.start, rows.count):
                yield chunk
            dispatches += rows.dispatches
            sent += rows.count
        item.admitted.release()
        item.seconds[Stage.STREAM] = time.monotonic() - item.ready_at
        metrics.EMBEDDING_BYTES.inc(item.admitted.rows.size)
        for stage, seconds in item.seconds.items():
            metrics.STAGE_DURATION.labels(stage).observe(seconds)
        yield pb.EncodeResponse(
            item_index=index, finished=wire.finished_message(dispatches, stream.crc32, item.seconds)
        )
        _count(Result.OK)

    def _started(self, options: _Options, item: _Item) -> pb.EncodeResponse:
        plan = item.planned.plan
        started = pb.ItemStarted(
            plan=wire.plan_message(plan),
            layout=wire.layout_message(options.planner.layout, options.dtype, plan.tokens),
            digest=item.digest,
            instance_id=self._state.instance_id,
        )
        return pb.EncodeResponse(item_index=item.planned.index, started=started)


def _planned_message(plan: ItemPlan | NeedBytes | ServiceError) -> pb.PlannedItem:
    match plan:
        case ItemPlan():
            return pb.PlannedItem(plan=wire.plan_message(plan))
        case NeedBytes():
            return pb.PlannedItem(need_bytes=plan.count)
        case ServiceError():
            return pb.PlannedItem(failed=to_item_failed(plan))


def _check_model(name: str, model: Model) -> None:
    if name not in ("", model.name):
        raise ServiceError(
            "MODEL_NOT_LOADED",
            f"this server has the model {model.name}: ask for it, or for none in particular",
            subject=name,
            metadata={"model": model.name},
        )


def _check_count(count: int, limit: int) -> None:
    if not count:
        raise _invalid("items", "the request has no items: send at least one")
    if count > limit:
        raise ServiceError(
            "REQUEST_TOO_LARGE",
            f"the request has {count} items, the limit is {limit}: send fewer in a call",
            subject="items",
            metadata={"resource": "items", "requested": count, "limit": limit},
        )


def _check_videos(count: int) -> None:
    if count > MAX_VIDEOS:
        raise ServiceError(
            "REQUEST_TOO_LARGE",
            f"the request has {count} videos, the limit is {MAX_VIDEOS}: send fewer in a call",
            subject="items",
            metadata={"resource": "videos", "requested": count, "limit": MAX_VIDEOS},
        )


def _invalid(field: str, message: str) -> ServiceError:
    return ServiceError("REQUEST_INVALID", message, subject=field)


def _result(error: BaseException | None, expired: bool = False) -> Result:
    match error:
        case None:
            return Result.OK
        case ServiceError() if error.reason == "EXPIRED_IN_QUEUE":
            return Result.EXPIRED
        case ServiceError() if error.row.code in (code_pb2.INVALID_ARGUMENT, code_pb2.UNIMPLEMENTED):
            return Result.INVALID
        case Exception():
            return Result.FAILED
        case _:  # CancelledError, GeneratorExit
            return Result.EXPIRED if expired else Result.CANCELLED


def _count(result: Result, items: int = 1) -> int:
    metrics.ITEMS.labels(result).inc(items)
    return items
