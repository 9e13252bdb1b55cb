"""Fetches rows into files that every rank of this host maps, on a thread of its own."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

import numpy as np

from opticnerve.client import AsyncClient
from opticnerve.errors import UnavailableError
from opticnerve.integrations.vllm.reference import Reference
from opticnerve.integrations.vllm.requests import RowsError, is_finite
from opticnerve.integrations.vllm.settings import Settings
from opticnerve.tensors import Embedding

_PREFIX = "opticnerve-vllm-"
_LOCK = "lock"


class Fetcher:
    """Fetches on an event loop in a thread. `fetch`, `discard` and `close` may be called from any thread."""

    def __init__(self, settings: Settings) -> None:
        """Makes a directory of its own. Raises ValueError where `settings.directory` has no room."""
        self._settings = settings
        self._clients: dict[tuple[str, str], AsyncClient] = {}  # by address and fingerprint
        self._files = 0
        remove_abandoned(settings.directory)
        free = shutil.disk_usage(settings.directory).free
        if free < settings.cache_bytes:
            raise ValueError(
                f"{settings.directory} has {free} bytes free, cache_bytes is {settings.cache_bytes}: set a smaller "
                "cache_bytes, or give the container more shared memory"
            )
        self.directory = settings.directory / f"{_PREFIX}{os.getpid()}-{id(self):x}"
        self.directory.mkdir(mode=0o700)
        self._lock = (self.directory / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="opticnerve-fetch", daemon=True)
        self._thread.start()

    def fetch(self, reference: Reference, address: str, rows: int, width: int) -> Future[Path]:
        """Starts to fetch; returns at once. The future has a file of `rows` x `width` numbers, row after row.

        It fails with OpticnerveError, with RowsError for rows that do not fit or are not finite, with OSError where
        the directory has no room. The server waits for what it still encodes.
        """
        self._files += 1
        path = self.directory / str(self._files)
        call = self._fetch(reference, address, (rows, width), path)
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def discard(self, path: Path) -> None:
        """Lets go of a file's memory, later."""
        self._loop.call_soon_threadsafe(path.unlink)

    def close(self) -> None:
        """Cancels what is being fetched and removes every file. Files that a rank has mapped stay mapped."""

        async def end() -> None:
            running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for client in self._clients.values():
                await client.close()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        shutil.rmtree(self.directory)
        self._lock.close()

    async def _fetch(self, reference: Reference, address: str, shape: tuple[int, int], path: Path) -> Path:
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
        await asyncio.to_thread(_write, embedding, shape, path)
        return path


def _write(embedding: Embedding, shape: tuple[int, int], path: Path) -> None:
    rows = embedding.array
    if rows.shape != shape:
        raise RowsError(
            f"the server has {rows.shape[0]} rows of width {rows.shape[1]}, the prompt has {shape[0]} placeholders and "
            f"the model rows of width {shape[1]}"
        )
    if not is_finite(rows):
        raise RowsError("the rows hold NaN or infinity")
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, rows.nbytes)  # a mapping of what has no memory would be a SIGBUS
            file.write(rows.view(np.uint8).data)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def remove_abandoned(directory: Path) -> None:
    """Removes what engines have left that were killed: their directories, which nobody has locked."""
    for left in directory.glob(f"{_PREFIX}*"):
        try:
            with (left / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
        except (BlockingIOError, FileNotFoundError, PermissionError):
            continue  # alive, just being made, or another user's
