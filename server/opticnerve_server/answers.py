"""What a caller is told of an item, and how its end is counted.

It started, its rows or where they are, it is finished; or why it failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TypeAlias

from google.rpc import code_pb2

from opticnerve.v1 import encoder_pb2 as pb

from . import metrics, tracing, wire
from .admission import AdmittedItem
from .errors import Scope, ServiceError, to_duration, to_item_failed
from .messages import Rows
from .metrics import Result, Stage
from .options import Options
from .preprocess import PlannedItem
from .stream import RowStream
from .types import Dispatched, ItemPlan

_CALLERS_FAULT = (code_pb2.INVALID_ARGUMENT, code_pb2.UNIMPLEMENTED, code_pb2.NOT_FOUND)


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


async def streamed(item: CallItem, options: Options) -> AsyncGenerator[Answer, None]:
    """All messages of an item. Its slot is released when the transport has taken the last row that there is."""
    stream = RowStream(item.index, item.admitted.rows, options.row_bytes, options.max_chunk_bytes)
    dispatches: list[Dispatched] = []
    sent = 0
    while item.plan is None or sent < item.plan.tokens:
        rows = await item.rows.get()
        if isinstance(rows, ServiceError):
            item.admitted.release()
            if rows.row.scope is Scope.CALL:
                raise rows
            yield failed(item.index, rows)
            return
        if not sent:
            yield _started(item, options)
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


async def held(item: CallItem, options: Options) -> AsyncGenerator[Answer, None]:
    """Both messages of an item that is held."""
    if item.failure is not None:
        yield failed(item.index, item.failure)
        return
    yield _started(item, options)
    yield _finished(item, [], 0)


def failed(index: int, error: ServiceError) -> pb.EncodeResponse:
    """The only message of an item that failed."""
    _count(_result(error))
    tracing.item_failed(index, error.reason)
    return pb.EncodeResponse(item_index=index, failed=to_item_failed(error))


def unanswered(error: BaseException, items: int, expired: bool) -> None:
    """Count that many items of a call that ends by `error`; `expired`: its deadline has passed."""
    _count(_result(error, expired), items)


def _started(item: CallItem, options: Options) -> pb.EncodeResponse:
    assert item.plan is not None, "rows come after Found"
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
