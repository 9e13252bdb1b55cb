"""Where a part and its receivers meet: each may be heard of first.

SGLang's tokenizer sends the part, and every tensor-parallel rank of its scheduler tells, in a request of its own, where
it receives. A rank's request waits for the part that it names; the part waits until as many ranks have told as each
says there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from opticnerve.errors import DeadlineExceededError, RequestInvalidError, ResourceExhaustedError

PATIENCE_S = 180.0
"""For the other side to come: as long as SGLang's own encoder and receivers wait."""

MAX_WAITING = 4096
"""Receivers that wait for their part: each is an open request."""


class Receivers:
    """Of one part: distinct endpoints, in the order they were told."""

    def __init__(self) -> None:
        self.endpoints: list[str] = []
        self._count: int | None = None  # how many there will be; None until one has told
        self._told = asyncio.Condition()

    async def tell(self, endpoint: str, count: int) -> None:
        """One more, of `count`; the same again is no other. Raises RequestInvalidError where counts differ."""
        if self._count not in (None, count):
            raise RequestInvalidError(f"of {count} receivers now, of {self._count} before", code="INVALID_ARGUMENT")
        self._count = count
        if endpoint not in self.endpoints:
            self.endpoints.append(endpoint)
        async with self._told:
            self._told.notify_all()

    async def each(self) -> AsyncIterator[str]:
        """Every endpoint as soon as it is told, until all are. Raises DeadlineExceededError after PATIENCE_S."""
        until = asyncio.get_running_loop().time() + PATIENCE_S
        given = 0
        while self._count is None or given < self._count:
            try:
                async with asyncio.timeout_at(until), self._told:
                    await self._told.wait_for(lambda: len(self.endpoints) > given)  # noqa: B023 - not kept
            except TimeoutError:
                raise DeadlineExceededError(
                    f"{given} of {self._count or 'all'} receivers told where they are within {PATIENCE_S:g} s",
                    code="DEADLINE_EXCEEDED",
                ) from None
            yield self.endpoints[given]
            given += 1


class Rendezvous:
    """The parts inside, by the id that their receivers name them by. For one event loop."""

    def __init__(self) -> None:
        self._parts: dict[str, Receivers] = {}
        self._came = asyncio.Condition()
        self._waiting = 0

    @asynccontextmanager
    async def part(self, req_id: str) -> AsyncIterator[Receivers]:
        """The receivers of a part, from its arrival to its end. Raises RequestInvalidError if it is inside already."""
        if req_id in self._parts:
            raise RequestInvalidError(f"{req_id} is being encoded already", code="INVALID_ARGUMENT")
        self._parts[req_id] = receivers = Receivers()
        try:
            async with self._came:
                self._came.notify_all()
            yield receivers
        finally:
            del self._parts[req_id]

    async def tell(self, req_id: str, endpoint: str, count: int) -> None:
        """Where one of `count` receivers of a part is. Waits for a part that has not come.

        Raises DeadlineExceededError after PATIENCE_S, ResourceExhaustedError where too many wait, and
        RequestInvalidError.
        """
        if self._waiting >= MAX_WAITING:
            message = f"{MAX_WAITING} receivers wait for their parts: send them the parts first"
            raise ResourceExhaustedError(message, code="RESOURCE_EXHAUSTED")
        self._waiting += 1
        try:
            async with asyncio.timeout(PATIENCE_S), self._came:
                await self._came.wait_for(lambda: req_id in self._parts)
        except TimeoutError:
            raise DeadlineExceededError(
                f"no part {req_id} came within {PATIENCE_S:g} s", code="DEADLINE_EXCEEDED"
            ) from None
        finally:
            self._waiting -= 1
        await self._parts[req_id].tell(endpoint, count)
