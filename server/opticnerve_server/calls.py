"""One Encode call: its items from their grant to their last answer.

Runs on the asyncio loop of a front-end. What ends one item is its ServiceError; what ends the call is raised as one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from .activity import Activity
from .admission import Admission
from .answers import Answer, CallItem, failed, held, streamed, unanswered
from .budgets import cut
from .errors import ServiceError, internal_error
from .interceptors import is_expired
from .messages import Found, ItemRequest, Rows, TakeOver
from .metrics import Stage
from .options import Options
from .preprocess import PlannedItem, Preprocessor

log = logging.getLogger(__name__)

_Answerer = Callable[[CallItem, Options], AsyncGenerator[Answer, None]]


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
                async with aclosing(self._answers(items, streamed)) as answers:
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
        async with aclosing(self._answers(admitted.result(), held)) as answers:
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
                yield failed(index, error)
                waiting -= 1
            for _ in items:
                async with aclosing(answer(await self._ready.get(), self._options)) as messages:
                    async for message in messages:
                        yield message
                waiting -= 1
        except BaseException as error:
            unanswered(error, waiting, expired=is_expired(self._options.deadline - time.monotonic()))
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
