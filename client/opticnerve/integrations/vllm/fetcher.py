"""Fetches rows into memory that every rank of this host maps, on a thread of its own."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from threading import Lock, Thread

from opticnerve.client import AsyncClient
from opticnerve.errors import UnavailableError
from opticnerve.integrations.vllm.memory import SharedMemory
from opticnerve.integrations.vllm.reference import Reference
from opticnerve.integrations.vllm.requests import RowsError, is_finite
from opticnerve.integrations.vllm.settings import Settings
from opticnerve.tensors import Embedding


class Fetcher:
    """Fetches on an event loop in a thread. `fetch`, `discard` and `close` may be called from any thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._clients: dict[tuple[str, str], AsyncClient] = {}  # by address and fingerprint
        self._memory = SharedMemory()
        self._writing = Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="opticnerve-fetch", daemon=True)
        self._thread.start()

    @property
    def path(self) -> str:
        """What ranks map."""
        return self._memory.path

    def fetch(self, reference: Reference, address: str, rows: int, width: int) -> Future[int]:
        """Starts to fetch; returns at once. The future has the offset of `rows` x `width` numbers, row after row.

        It fails with OpticnerveError, with RowsError for rows that do not fit or are not finite, with OSError where
        there is no memory. The server waits for what it still encodes.
        """
        call = self._fetch(reference, address, (rows, width))
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def discard(self, offset: int, nbytes: int) -> None:
        """Gives memory back, soon: of large rows it takes milliseconds."""
        self._loop.call_soon_threadsafe(self._memory.free, offset, nbytes)

    def close(self) -> None:
        """Cancels what is being fetched and gives all memory back. What a rank has mapped stays mapped."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._memory.close()

    async def _fetch(self, reference: Reference, address: str, shape: tuple[int, int]) -> int:
        key = (address, reference.fingerprint)
        if key not in self._clients:
            self._clients[key] = AsyncClient(
                address,
                timeout=self._settings.timeout_s,
                wait_until_ready=False,
                fingerprint=reference.fingerprint,
                tls=self._settings.tls,
                token=self._settings.token,
            )
        try:
            [embedding] = [item async for item in self._clients[key].encode([reference.media], dtype=reference.dtype)]
        except UnavailableError:
            if client := self._clients.pop(key, None):  # a server that went away is not kept in mind
                await client.close()
            raise
        return await asyncio.to_thread(self._store, embedding, shape)

    def _store(self, embedding: Embedding, shape: tuple[int, int]) -> int:
        rows = embedding.array
        if rows.shape != shape:
            raise RowsError(
                f"the server has {rows.shape[0]} rows of width {rows.shape[1]}, the prompt has {shape[0]} placeholders "
                f"and the model rows of width {shape[1]}"
            )
        if not is_finite(rows):
            raise RowsError("the rows hold NaN or infinity")
        with self._writing:
            return self._memory.put(rows)

    async def _end(self) -> None:
        running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for client in self._clients.values():
            await client.close()
        await self._loop.shutdown_default_executor()
