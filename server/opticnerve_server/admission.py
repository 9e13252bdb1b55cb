"""A front-end's side of admission: asks the engine for slots, passes items to it, routes its answers to waiting calls.

Everything here runs on the asyncio loop's thread. The socket is read and written without blocking.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future as Job
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from . import messages
from .errors import TABLE, ServiceError
from .messages import Failed, Granted, ItemRequest, Refused, Release, Reserve, Rows, Slot, Submit
from .slots import Arena
from .types import ItemPlan

Answers = asyncio.Queue[Rows | ServiceError]
"""What the engine says of one item; bounded by the item's parts."""

MAX_UNSENT = 1024
"""Unsent messages over which no call is let in: the engine is behind. What admitted items still send is bounded too."""

MESSAGES_PER_TURN = 64
"""Messages routed before other work of the loop gets its turn."""


class AdmittedItem:
    """One item's hold on its slot, from the grant to `release`."""

    def __init__(self, admission: Admission, call: int, index: int, request: ItemRequest, slot: Slot) -> None:
        self.index = index
        self._admission = admission
        self._call = call
        self._request = request
        self._slot = slot
        self._writer: Job[Any] | None = None
        self._released = False

    @property
    def pixels(self) -> npt.NDArray[np.uint8]:
        """The slot's room for pixels, a view."""
        return self._admission.arena.bytes[self._slot.start : self._slot.start + self._request.pixel_bytes]

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        """The slot's room for rows, a view."""
        return self._admission.arena.bytes[self._slot.rows : self._slot.rows + self._request.row_bytes]

    @property
    def is_released(self) -> bool:
        """Whether the front-end is done with it. Any thread."""
        return self._released

    def written_by(self, job: Job[Any]) -> None:
        """Name the job in another thread that writes the pixels: `release` lets it finish first."""
        self._writer = job

    async def encode(self, plan: ItemPlan, dtype: str, deadline: float) -> AsyncIterator[Rows]:
        """Pass the written pixels to the engine; yields when rows are in the slot, in order. Raises ServiceError."""
        answers = self._admission.submit(Submit(self._call, self.index, plan, dtype, deadline))
        try:
            received = 0
            while received < plan.tokens:
                rows = await answers.get()
                if isinstance(rows, ServiceError):
                    raise rows
                received += rows.count
                yield rows
        finally:
            self._admission.forget(self._call, self.index)

    def release(self) -> None:
        """Give the slot back, once: now, or when the thread that writes into it is done. Later calls do nothing."""
        if self._released:
            return
        self._released = True
        message = Release(self._call, self.index)
        if self._writer is None or self._writer.cancel() or self._writer.done():
            self._admission.release(message)
        else:
            self._writer.add_done_callback(lambda _: self._admission.release_from_thread(message))


class _Call:
    """A call between its Reserve and the end of its `reserve` block."""

    def __init__(self, requests: dict[int, ItemRequest], granted: asyncio.Future[None]) -> None:
        self.requests = requests
        self.granted = granted
        self.items: list[AdmittedItem] = []
        self.over = False


class Admission:
    """The connection to the engine. `lost` is set when the engine is gone; every waiting call fails then."""

    def __init__(self, connection: socket.socket, arena: Arena) -> None:
        """To be made on the loop that will use it. Takes over `connection`."""
        self.arena = arena
        self.lost = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._unsent: deque[bytes] = deque()
        self._numbers = itertools.count()
        self._asking: dict[int, _Call] = {}
        self._encoding: dict[tuple[int, int], Answers] = {}
        connection.setblocking(False)
        self._loop.add_reader(connection, self._receive)

    def close(self) -> None:
        """End the connection; what still waits fails."""
        self._lose()
        self._connection.close()

    @asynccontextmanager
    async def reserve(self, requests: dict[int, ItemRequest]) -> AsyncIterator[Sequence[AdmittedItem]]:
        """Slots for all items of a call, by their indices; all are released at the end of the block, however it ends.

        Raises ServiceError: QUEUE_FULL when they do not fit now, REQUEST_TOO_LARGE when they never will, GPU_FAULT.
        """
        if not requests:
            yield []
            return
        if self.lost.is_set():
            raise _engine_lost()
        if len(self._unsent) >= MAX_UNSENT:
            raise ServiceError("QUEUE_FULL", "the engine is behind with its messages: retry later", subject="calls")
        number = next(self._numbers)
        call = self._asking[number] = _Call(requests, self._loop.create_future())
        try:
            self._send(Reserve(number, list(requests), list(requests.values())))
            await call.granted
            yield call.items
        finally:
            call.over = True
            for item in call.items:
                item.release()

    def submit(self, message: Submit) -> Answers:
        """Hand an item to the engine; its answers arrive in the returned queue until `forget`. Raises ServiceError."""
        if self.lost.is_set():
            raise _engine_lost()
        answers = self._encoding[message.call, message.index] = asyncio.Queue()
        self._send(message)
        return answers

    def forget(self, call: int, index: int) -> None:
        """No longer take answers to an item."""
        self._encoding.pop((call, index), None)

    def release(self, message: Release) -> None:
        """Tell the engine that a slot is free."""
        self._send(message)

    def release_from_thread(self, message: Release) -> None:
        """`release`, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send, message)

    # --- the socket

    def _send(self, message: messages.ToEngine) -> None:
        if self.lost.is_set():
            return  # nobody is left to tell, and the engine's death has freed every slot
        self._unsent.append(messages.encode(message))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._connection.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._connection, self._flush)
        except OSError:  # the engine is gone
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
            case Refused():
                call = self._asking.pop(message.call)
                if not call.granted.done():
                    call.granted.set_exception(_refusal(message))
            case Rows() | Failed():
                answers = self._encoding.get((message.call, message.index))
                if answers is not None:
                    answers.put_nowait(message if isinstance(message, Rows) else _failure(message))
            case _:
                raise TypeError(f"{type(message).__name__} is no message of the engine")

    def _grant(self, message: Granted) -> None:
        call = self._asking.pop(message.call)
        call.items = [
            AdmittedItem(self, message.call, index, request, slot)
            for (index, request), slot in zip(call.requests.items(), message.slots, strict=True)
        ]
        if call.over:  # cancelled while it asked
            for item in call.items:
                item.release()
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
                call.granted.set_exception(_engine_lost())
        for answers in self._encoding.values():
            answers.put_nowait(_engine_lost())
        self._asking.clear()


def _refusal(refused: Refused) -> ServiceError:
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


def _failure(failed: Failed) -> ServiceError:
    reason = failed.reason if failed.reason in TABLE else "INTERNAL"
    metadata = {"stage": "queue"} if reason == "EXPIRED_IN_QUEUE" else {}
    return ServiceError(reason, failed.message, retry_after=failed.retry_after, metadata=metadata)


def _engine_lost() -> ServiceError:
    return ServiceError("GPU_FAULT", "the device has failed and the server stops: retry on another one")
