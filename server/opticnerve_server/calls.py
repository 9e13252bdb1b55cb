"""One Encode call: its items from their grant to their last answer.

Runs on the asyncio loop of a front-end. What ends one item is its ServiceError; what ends the call is raised as one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from google.rpc import code_pb2

from opticnerve.v1 import encoder_pb2 as pb

from . import metrics, tracing, wire
from .admission import Admission, AdmittedItem
from .budgets import cut
from .errors import Scope, ServiceError, internal_error, to_duration, to_item_failed
from .info import Model
from .interceptors import is_expired
from .messages import Found, Hold, ItemRequest, Rows, TakeOver
from .metrics import Result, Stage
from .preprocess import PlannedItem, Preprocessor
from .store import key_of
from .stream import CHUNK_BYTES, RowStream
from .types import ROW_BYTES, Capacity, Dispatched, ItemPlan

log = logging.getLogger(__name__)

_CALLERS_FAULT = (code_pb2.INVALID_ARGUMENT, code_pb2.UNIMPLEMENTED, code_pb2.NOT_FOUND)


class Activity:
    """Counts what goes on inside the service: `idle` is set while nothing does."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        self.idle.set()
        self._active = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> None:
        self._active += 1
        self.idle.clear()

    def __exit__(self, *_: object) -> None:
        self._active -= 1
        if not self._active:
            self.idle.set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that is counted, and kept, until it ends."""

        async def counted() -> None:
            with self:
                await work

        task = asyncio.create_task(counted())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What holds for all items of a call."""

    model: Model
    fingerprint: str
    dtype: str
    arrived: float  # time.monotonic(), as is the next
    deadline: float
    tenant: str = ""
    max_chunk_bytes: int = CHUNK_BYTES
    hold: Hold | None = None
    store_bytes: int = 0
    instance_id: str = ""
    bounds: Mapping[str, Sequence[Capacity]] = field(default_factory=dict)  # of a batch, by path
    address: str = ""  # where held rows are fetched

    @property
    def row_bytes(self) -> int:
        return self.model.planner.layout.width * ROW_BYTES[self.dtype]

    def needs(self, planned: PlannedItem) -> ItemRequest:
        """What an item needs to be admitted. Raises ServiceError for one that can never be held."""
        key, plan, encoded = b"", planned.plan, planned.message.ByteSize()
        if self.store_bytes:
            key = key_of(
                planned.digest,
                self.tenant,
                fingerprint=self.fingerprint,
                sampling=planned.sampling,
                dtype=self.dtype,
            )
        if plan is None:
            return ItemRequest(0, encoded, 0, 0, key, fetch=True)
        rows = plan.tokens * self.row_bytes
        if self.hold is not None and rows > self.store_bytes:
            raise ServiceError(
                "ITEM_TOO_LARGE",
                f"the rows take {rows} bytes, the store holds {self.store_bytes} (store_bytes): stream them instead",
                metadata={"bytes": rows, "store_bytes": self.store_bytes},
            )
        return ItemRequest(plan.tokens, encoded, plan.pixel_bytes, rows, key)


@dataclass(slots=True)
class CallItem:
    """One admitted item on its way."""

    planned: PlannedItem
    admitted: AdmittedItem
    seconds: dict[str, float]  # by stage
    plan: ItemPlan | None  # None until the scheduler says what a digest stands for
    is_shared: bool  # somebody else encodes it, or has
    rows: asyncio.Queue[Rows | ServiceError] = field(default_factory=asyncio.Queue)  # bounded by the item's parts
    failure: ServiceError | None = None
    ready_at: float = 0.0  # time.monotonic() when there was first something to answer

    @property
    def index(self) -> int:
        return self.planned.index

    def stages(self, arrived: float) -> dict[str, tuple[float, float]]:
        """When each stage of a streamed item began and ended, in time.monotonic(): those up to the first rows one
        behind the other, back from when they were heard of.
        """
        spans: dict[str, tuple[float, float]] = {Stage.ADMIT: (arrived, arrived + self.seconds[Stage.ADMIT])}
        end = self.ready_at
        for stage in (Stage.COPY, Stage.EXECUTE, Stage.QUEUE, Stage.PREPROCESS):
            if stage in self.seconds:
                spans[stage] = (end - self.seconds[stage], end)
                end = spans[stage][0]
        return spans | {Stage.STREAM: (self.ready_at, self.ready_at + self.seconds[Stage.STREAM])}


Answer: TypeAlias = pb.EncodeResponse | bytes
"""A message, or one of rows, which is serialised already."""

_Answerer = Callable[[CallItem], AsyncGenerator[Answer, None]]


class Call:
    """One call. Either `stream` or `hold` is iterated, once; closed early, it releases what it was granted."""

    def __init__(
        self,
        options: Options,
        plans: list[PlannedItem | ServiceError],
        admission: Admission,
        preprocessor: Preprocessor,
    ) -> None:
        self._options = options
        self._admission = admission
        self._preprocessor = preprocessor
        self._planned: dict[int, PlannedItem] = {}
        self._requests: dict[int, ItemRequest] = {}
        self._refused: dict[int, ServiceError] = {}
        self._ready: asyncio.Queue[CallItem] = asyncio.Queue()  # bounded by the call's items
        for index, plan in enumerate(plans):
            try:
                if isinstance(plan, ServiceError):
                    raise plan
                self._requests[index], self._planned[index] = options.needs(plan), plan
            except ServiceError as error:
                self._refused[index] = error

    async def stream(self) -> AsyncGenerator[Answer, None]:
        """The answers of all items with their rows, in the order of their first rows.

        Nothing is sent before admission: after its first message a call is not retried by the channel.
        """
        async with self._admit() as items:
            tasks = [asyncio.create_task(self._encode(item)) for item in items]
            try:
                async with aclosing(self._answers(items, self._answer)) as answers:
                    async for answer in answers:
                        yield answer
            finally:
                for task in tasks:
                    task.cancel()

    async def hold(self, activity: Activity) -> AsyncGenerator[Answer, None]:
        """The answers of all items as soon as they are planned. Once admitted they are encoded whoever goes away."""
        admitted: asyncio.Future[list[CallItem]] = asyncio.get_running_loop().create_future()

        async def encode() -> None:
            async with self._admit() as items:
                admitted.set_result(items)
                await asyncio.gather(*(self._encode(item) for item in items))

        encoding = activity.start(encode())
        try:
            waited: set[asyncio.Future[Any]] = {encoding, admitted}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not admitted.done():
                encoding.cancel()
            raise
        if not admitted.done():
            await encoding  # raises why
        async with aclosing(self._answers(admitted.result(), self._answer_held)) as answers:
            async for answer in answers:
                yield answer

    @asynccontextmanager
    async def _admit(self) -> AsyncIterator[list[CallItem]]:
        options = self._options
        reservation = self._admission.reserve(
            self._requests,
            deadline=options.deadline if options.hold is None else float("inf"),
            tenant=options.tenant,
            hold=options.hold,
        )
        async with reservation as grants:
            items = []
            for index, grant in grants.items():
                if isinstance(grant, ServiceError):
                    self._refused[index] = grant
                else:
                    planned = self._planned[index]
                    seconds: dict[str, float] = {Stage.ADMIT: time.monotonic() - options.arrived}
                    items.append(CallItem(planned, grant, seconds, planned.plan, is_shared=not grant.writes))
            yield items

    async def _answers(self, items: list[CallItem], answer: _Answerer) -> AsyncGenerator[Answer, None]:
        """The answers of all items as they get ready; counts how each ends."""
        waiting = len(self._refused) + len(items)
        try:
            for index, error in self._refused.items():
                yield _failed(index, error)
                waiting -= 1
            for _ in items:
                async with aclosing(answer(await self._ready.get())) as messages:
                    async for message in messages:
                        yield message
                waiting -= 1
        except BaseException as error:
            _count(_result(error, expired=is_expired(self._options.deadline - time.monotonic())), waiting)
            raise

    # --- encoding

    async def _encode(self, item: CallItem) -> None:
        """From the grant to the last rows in the slot, or to the failure, which ends up in `item.rows` too."""
        received = 0
        try:
            self._planned_now(item)
            if item.admitted.writes:
                await self._write(item)
            while item.plan is None or received < item.plan.tokens:
                match await item.admitted.heard():
                    case TakeOver():
                        item.is_shared = False
                        await self._write(item)
                    case Found(plan=plan):
                        item.plan = plan
                        self._planned_now(item)
                    case Rows() as rows:
                        received += rows.count
                        item.rows.put_nowait(rows)
                        self._announce(item)
        except Exception as error:
            item.failure = error if isinstance(error, ServiceError) else internal_error(error)
            if item.ready_at and self._options.hold is not None:
                log.warning("held item failed", extra={"reason": item.failure.reason, "error": item.failure.message})
            item.rows.put_nowait(item.failure)
            self._announce(item)
        if self._options.hold is not None:
            item.admitted.release()

    async def _write(self, item: CallItem) -> None:
        """Decode and resize into the slot, and pass it to the scheduler."""
        started = time.monotonic()
        assert item.plan is not None, "only items with media are written"
        job = self._preprocessor.prepare(
            self._options.model.planner, item.planned, item.admitted.pixels, lambda: not item.admitted.is_released
        )
        item.admitted.written_by(job)
        await asyncio.wrap_future(job)
        item.seconds[Stage.PREPROCESS] = time.monotonic() - started
        options = self._options
        item.admitted.submit(item.plan, options.dtype, cut(item.plan, options.model.planner, options.bounds))

    def _planned_now(self, item: CallItem) -> None:
        """What is held is answered as soon as its plan is known."""
        if item.plan is not None and self._options.hold is not None:
            self._announce(item)

    def _announce(self, item: CallItem) -> None:
        """There is something to answer: now the item is ready, once."""
        if not item.ready_at:
            item.ready_at = time.monotonic()
            self._ready.put_nowait(item)

    # --- answering

    async def _answer(self, item: CallItem) -> AsyncGenerator[Answer, None]:
        """All messages of an item. Its slot is released when the transport has taken the last row that there is."""
        options = self._options
        stream = RowStream(item.index, item.admitted.rows, options.row_bytes, options.max_chunk_bytes)
        dispatches: list[Dispatched] = []
        sent = 0
        while item.plan is None or sent < item.plan.tokens:
            rows = await item.rows.get()
            if isinstance(rows, ServiceError):
                item.admitted.release()
                if rows.row.scope is Scope.CALL:
                    raise rows
                yield _failed(item.index, rows)
                return
            if not sent:
                yield self._started(item)
                item.seconds |= {Stage.QUEUE: rows.queue_s, Stage.EXECUTE: rows.execute_s, Stage.COPY: rows.copy_s}
            for chunk in stream.chunks(rows.start, rows.count):
                yield chunk
            dispatches += rows.dispatches
            sent += rows.count
        item.admitted.release(served=True)
        item.seconds[Stage.STREAM] = time.monotonic() - item.ready_at
        metrics.EMBEDDING_BYTES.inc(item.admitted.rows.size)
        for stage, seconds in item.seconds.items():
            metrics.STAGE_DURATION.labels(stage).observe(seconds)
        tracing.item(item.index, item.stages(options.arrived), dispatches)
        yield _finished(item, dispatches, stream.crc32)

    async def _answer_held(self, item: CallItem) -> AsyncGenerator[Answer, None]:
        """Both messages of an item that is held."""
        if item.failure is not None:
            yield _failed(item.index, item.failure)
            return
        yield self._started(item)
        yield _finished(item, [], 0)

    def _started(self, item: CallItem) -> pb.EncodeResponse:
        assert item.plan is not None, "rows come after Found"
        options = self._options
        started = pb.ItemStarted(
            plan=wire.plan_message(item.plan),
            layout=wire.layout_message(options.model.planner.layout, options.dtype, item.plan.tokens),
            digest=item.planned.digest,
            instance_id=options.instance_id,
        )
        if options.hold is not None:
            started.address = options.address
            started.lease_expiry.CopyFrom(to_duration(options.hold.seconds))
        return pb.EncodeResponse(item_index=item.index, started=started)


def _finished(item: CallItem, dispatches: list[Dispatched], crc32: int) -> pb.EncodeResponse:
    _count(Result.OK)
    finished = wire.finished_message(dispatches, crc32, item.seconds, item.is_shared)
    return pb.EncodeResponse(item_index=item.index, finished=finished)


def _failed(index: int, error: ServiceError) -> pb.EncodeResponse:
    _count(_result(error))
    tracing.item_failed(index, error.reason)
    return pb.EncodeResponse(item_index=index, failed=to_item_failed(error))


def _result(error: BaseException, expired: bool = False) -> Result:
    match error:
        case ServiceError() if error.reason == "EXPIRED_IN_QUEUE":
            return Result.EXPIRED
        case ServiceError() if error.row.code in _CALLERS_FAULT:
            return Result.INVALID
        case Exception():
            return Result.FAILED
        case _:  # CancelledError, GeneratorExit
            return Result.EXPIRED if expired else Result.CANCELLED


def _count(result: Result, items: int = 1) -> None:
    metrics.ITEMS.labels(result).inc(items)
