"""What goes on inside the service, so that it can be waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


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
