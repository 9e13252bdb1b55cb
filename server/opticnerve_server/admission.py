"""A front-end's side of admission: asks the scheduler for slots, passes items on, routes its answers to waiting calls.

Everything here runs on the asyncio loop's thread. The socket is read and written without blocking.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future as Job
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from . import messages, tracing
from .errors import TABLE, ServiceError
from .messages import (
    EndLeases,
    Failed,
    Found,
    Grant,
    Granted,
    GrantKind,
    Hold,
    ItemRequest,
    LeasesEnded,
    Refused,
    Release,
    Reserve,
    Rows,
    Submit,
    TakeOver,
    TooLate,
)
from .slots import Arena
from .types import ItemPlan

Answer = TakeOver | Found | Rows | ServiceError
"""What the scheduler says of one item."""

MAX_UNSENT = 1024
"""Unsent messages over which no call is let in: the server is behind. What admitted items still send is bounded too."""

MESSAGES_PER_TURN = 64
"""Messages routed before other work of the loop gets its turn."""


class AdmittedItem:
    """One item's hold on its slot, from the grant to `release`.

    `writes` says that its pixels are ours to write and submit; it turns true when a TakeOver is heard.
    """

    def __init__(
        self, admission: Admission, call: int, index: int, pixel_bytes: int, grant: Grant, said: asyncio.Queue[Answer]
    ) -> None:
        self.index = index
        self.writes = grant.kind is GrantKind.ENCODE
        self._admission = admission
        self._call = call
        self._pixel_bytes = pixel_bytes
        self._slot = grant.slot
        self._said = said
        self._writer: Job[Any] | None = None
        self._released = False

    @property
    def pixels(self) -> npt.NDArray[np.uint8]:
        """The slot's room for pixels, a view."""
        return self._admission.arena.bytes[self._slot.pixels : self._slot.pixels + self._pixel_bytes]

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        """The slot's room for rows, a view."""
        return self._admission.arena.bytes[self._slot.rows : self._slot.end]

    @property
    def is_released(self) -> bool:
        """Whether the front-end is done with it. Any thread."""
        return self._released

    def written_by(self, job: Job[Any]) -> None:
        """Name the job in another thread that writes the pixels: `release` lets it finish first."""
        self._writer = job

    def submit(self, plan: ItemPlan, dtype: str, parts: list[ItemPlan]) -> None:
        """Pass the written pixels to the scheduler, to be run as these parts. Raises ServiceError."""
        cut = parts if len(parts) > 1 else []
        self._admission.send(Submit(self._call, self.index, plan, dtype, cut, tracing.current()))

    async def heard(self) -> TakeOver | Found | Rows:
        """What the scheduler says next of the item. Raises ServiceError for what ends it."""
        said = await self._said.get()
        if isinstance(said, ServiceError):
            raise said
        self.writes |= isinstance(said, TakeOver)
        return said

    def release(self, served: bool = False) -> None:
        """Give the slot back, once: now, or when the thread that writes into it is done. Later calls do nothing.

        `served`: the caller has all rows.
        """
        if self._released:
            return
        self._released = True
        self._admission.forget(self._call, self.index)
        message = Release(self._call, self.index, served)
        if self._writer is None or self._writer.cancel() or self._writer.done():
            self._admission.send(message)
        else:
            self._writer.add_done_callback(lambda _: self._admission.send_from_thread(message))


class _Call:
    """A call between its Reserve and the end of its `reserve` block."""

    def __init__(self, requests: dict[int, ItemRequest], granted: asyncio.Future[None]) -> None:
        self.requests = requests
        self.granted = granted
        self.items: dict[int, AdmittedItem | ServiceError] = {}
        self.over = False

    def release(self) -> None:
        for item in self.items.values():
            if isinstance(item, AdmittedItem):
                item.release()


class Admission:
    """The connection to the scheduler. `lost` is set when that is gone; every waiting call fails then."""

    def __init__(self, connection: socket.socket, arena: Arena) -> None:
        """To be made on the loop that will use it. Takes over `connection`."""
        self.arena = arena
        self.lost = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._unsent: deque[bytes] = deque()
        self._numbers = itertools.count()
        self._asking: dict[int, _Call] = {}
        self._hearing: dict[tuple[int, int], asyncio.Queue[Answer]] = {}  # each bounded by the item's parts
        self._releasing: dict[int, asyncio.Future[int]] = {}
        connection.setblocking(False)
        self._loop.add_reader(connection, self._receive)

    def close(self) -> None:
        """End the connection; what still waits fails."""
        self._lose()
        self._connection.close()

    @asynccontextmanager
    async def reserve(
        self,
        requests: dict[int, ItemRequest],
        *,
        deadline: float = math.inf,
        tenant: str = "",
        hold: Hold | None = None,
    ) -> AsyncIterator[dict[int, AdmittedItem | ServiceError]]:
        """Slots for all items of a call, by their indices, or why one of them has none: NOT_CACHED, STORE_FULL.

        All are released at the end of the block, however it ends. Raises ServiceError: QUEUE_FULL when they do not fit
        now, REQUEST_TOO_LARGE when they never will, EXPIRED_IN_QUEUE when their rows cannot be there by `deadline`, in
        time.monotonic(), GPU_FAULT.
        """
        if not requests:
            yield {}
            return
        self._check()
        number = next(self._numbers)
        call = self._asking[number] = _Call(requests, self._loop.create_future())
        for index in requests:  # rows that others encode may be reported before the grant is
            self._hearing[number, index] = asyncio.Queue()
        try:
            self.send(Reserve(number, list(requests), list(requests.values()), deadline, tenant, hold))
            await call.granted
            yield call.items
        finally:
            call.over = True
            call.release()

    async def end_leases(self, names: Sequence[bytes]) -> int:
        """End a lease of each item of these names, see `store.name_of`; how many ended. Raises ServiceError."""
        self._check()
        number = next(self._numbers)
        answer: asyncio.Future[int] = self._loop.create_future()
        self._releasing[number] = answer
        try:
            self.send(EndLeases(number, list(names)))
            return await answer
        finally:
            del self._releasing[number]

    def send(self, message: messages.ToScheduler) -> None:
        """Tell the scheduler, which hears messages in their order. Raises ServiceError for a plan that is too long."""
        if self.lost.is_set():
            return  # nobody is left to tell, and its death has freed every slot
        data, limit = messages.encode(message), messages.MAX_MESSAGE_BYTES
        if len(data) > limit:
            raise ServiceError(
                "ITEM_TOO_LARGE", f"the item's plan takes {len(data)} bytes, the limit is {limit}: send fewer frames"
            )
        self._unsent.append(data)
        if len(self._unsent) == 1:
            self._flush()

    def send_from_thread(self, message: messages.ToScheduler) -> None:
        """`send`, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.send, message)

    def forget(self, call: int, index: int) -> None:
        """No longer hear of an item."""
        self._hearing.pop((call, index), None)

    def _check(self) -> None:
        if self.lost.is_set():
            raise _scheduler_lost()
        if len(self._unsent) >= MAX_UNSENT:
            raise ServiceError("QUEUE_FULL", "the server is behind with its messages: retry later", subject="calls")

    # --- the socket

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._connection.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._connection, self._flush)
        except OSError:  # the scheduler is gone
            self._lose()
        else:
            self._loop.remove_writer(self._connection)

    def _receive(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            try:
                data = self._connection.recv(messages.MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose()
                return
            self._route(messages.decode(data))

    def _route(self, message: messages.Message) -> None:
        match message:
            case Granted():
                self._grant(message)
            case Refused() | TooLate():
                call = self._asking.pop(message.call)
                for index in call.requests:
                    self.forget(message.call, index)
                if not call.granted.done():
                    call.granted.set_exception(_refusal(message))
            case TakeOver() | Found() | Rows() | Failed():
                said = self._hearing.get((message.call, message.index))
                if said is not None:
                    said.put_nowait(_failure(message) if isinstance(message, Failed) else message)
            case LeasesEnded():
                answer = self._releasing.get(message.call)
                if answer is not None and not answer.done():
                    answer.set_result(message.count)
            case _:
                raise TypeError(f"{type(message).__name__} is no message of the scheduler")

    def _grant(self, message: Granted) -> None:
        call, number = self._asking.pop(message.call), message.call
        for (index, request), grant in zip(call.requests.items(), message.grants, strict=True):
            if grant.kind in (GrantKind.MISSING, GrantKind.FULL):
                self.forget(number, index)
                call.items[index] = _ungranted(grant.kind)
            else:
                said = self._hearing[number, index]
                call.items[index] = AdmittedItem(self, number, index, request.pixel_bytes, grant, said)
        if call.over:  # cancelled while it asked
            call.release()
        elif not call.granted.done():
            call.granted.set_result(None)

    def _lose(self) -> None:
        if self.lost.is_set():
            return
        self.lost.set()
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._unsent.clear()
        for call in self._asking.values():
            if not call.granted.done():
                call.granted.set_exception(_scheduler_lost())
        for answer in self._releasing.values():
            if not answer.done():
                answer.set_exception(_scheduler_lost())
        for said in self._hearing.values():
            said.put_nowait(_scheduler_lost())
        self._asking.clear()


def _refusal(refused: Refused | TooLate) -> ServiceError:
    if isinstance(refused, TooLate):
        return ServiceError(
            "EXPIRED_IN_QUEUE",
            f"all rows can be there in {refused.needed_s:.2f} s at present, the deadline is in "
            f"{max(0.0, refused.left_s):.2f} s: set a later one, or ask another server",
            metadata={"stage": "admit", "needed_s": f"{refused.needed_s:.3f}"},
        )
    amounts = {"resource": refused.resource, "requested": refused.requested, "limit": refused.limit}
    if refused.retry_after is None:
        return ServiceError(
            "REQUEST_TOO_LARGE",
            f"the call needs {refused.requested} {refused.resource}, the whole queue holds {refused.limit}: "
            "send fewer or smaller items in a call",
            subject="items",
            metadata=amounts,
        )
    return ServiceError(
        "QUEUE_FULL",
        f"the queue of {refused.limit} {refused.resource} has no room for {refused.requested} more: retry later",
        subject=refused.resource,
        retry_after=refused.retry_after,
        metadata=amounts,
    )


def _ungranted(kind: GrantKind) -> ServiceError:
    if kind is GrantKind.MISSING:
        return ServiceError(
            "NOT_CACHED", "no rows of this digest are stored or on their way: send the media themselves"
        )
    return ServiceError("STORE_FULL", "the store is full of rows under a lease: retry when one has ended, or stream")


def _failure(failed: Failed) -> ServiceError:
    reason = failed.reason if failed.reason in TABLE else "INTERNAL"
    metadata = {"stage": "queue"} if reason == "EXPIRED_IN_QUEUE" else {}
    return ServiceError(reason, failed.message, retry_after=failed.retry_after, metadata=metadata)


def _scheduler_lost() -> ServiceError:
    return ServiceError("GPU_FAULT", "the device has failed and the server stops: retry on another one")
