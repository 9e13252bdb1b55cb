"""The client for code without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Iterable
from concurrent.futures import Future
from threading import Thread, current_thread
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

from opticnerve.channel import Tls
from opticnerve.client import DEFAULT_SERVER, DEFAULT_TIMEOUT_S, AsyncClient
from opticnerve.errors import ServerError
from opticnerve.media import MediaSource, SizeSource
from opticnerve.tensors import DtypeName, Embedding, Held, ItemPlan
from opticnerve.v1 import encoder_pb2 as pb

T = TypeVar("T")


class Client:
    """`AsyncClient` for code without an event loop: same arguments, same calls, same errors.

    The calls run on an event loop in a thread of their own, which starts with the client and ends with `close`. All
    methods may be called from any thread.
    """

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        wait_until_ready: bool = True,
        model: str = "",
        fingerprint: str = "",
        tls: Tls | None = None,
        token: str = "",
    ) -> None:
        self._client = AsyncClient(
            server,
            timeout=timeout,
            wait_until_ready=wait_until_ready,
            model=model,
            fingerprint=fingerprint,
            tls=tls,
            token=token,
        )
        self._stop = asyncio.Event()
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = Thread(target=asyncio.run, args=[self._live(started)], name="opticnerve-client", daemon=True)
        self._thread.start()
        self._loop = started.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections and the thread; calls in flight are cancelled. Once closed, does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    @overload
    def encode(
        self,
        items: Iterable[MediaSource],
        *,
        dtype: DtypeName = ...,
        timeout: float | None = ...,
        return_errors: Literal[False] = ...,
    ) -> Generator[Embedding, None, None]: ...

    @overload
    def encode(
        self, items: Iterable[MediaSource], *, dtype: DtypeName = ..., timeout: float | None = ..., return_errors: bool
    ) -> Generator[Embedding | ServerError, None, None]: ...

    def encode(
        self,
        items: Iterable[MediaSource],
        *,
        dtype: DtypeName = "bfloat16",
        timeout: float | None = None,
        return_errors: bool = False,
    ) -> Generator[Embedding | ServerError, None, None]:
        """`AsyncClient.encode` as an iterator: `[embedding] = client.encode(["photo.jpg"])`, or `list(...)`, or a loop.

        The call starts with the first step, and is cancelled when the iterator is closed.
        """
        answers = self._client.encode(items, dtype=dtype, timeout=timeout, return_errors=return_errors)

        running = asyncio.Lock()

        async def step() -> Embedding | ServerError | None:
            async with running:
                return await anext(answers, None)

        async def end() -> None:
            async with running:  # a step that was interrupted may still be unwinding
                await answers.aclose()

        exhausted = False
        try:
            while (answer := self._run(step())) is not None:
                yield answer
            exhausted = True
        finally:
            if not exhausted and self._thread.is_alive():
                ending = asyncio.run_coroutine_threadsafe(end(), self._loop)
                if current_thread() is not self._thread:  # there the garbage collector may end it: nobody to wait for
                    ending.result()

    @overload
    def hold(
        self,
        items: Iterable[MediaSource],
        *,
        ttl: float | None = ...,
        reads: int = ...,
        dtype: DtypeName = ...,
        timeout: float | None = ...,
        return_errors: Literal[False] = ...,
    ) -> list[Held]: ...

    @overload
    def hold(
        self,
        items: Iterable[MediaSource],
        *,
        ttl: float | None = ...,
        reads: int = ...,
        dtype: DtypeName = ...,
        timeout: float | None = ...,
        return_errors: bool,
    ) -> list[Held | ServerError]: ...

    def hold(
        self,
        items: Iterable[MediaSource],
        *,
        ttl: float | None = None,
        reads: int = 0,
        dtype: DtypeName = "bfloat16",
        timeout: float | None = None,
        return_errors: bool = False,
    ) -> list[Any]:
        """As `AsyncClient.hold`."""
        call = self._client.hold(items, ttl=ttl, reads=reads, dtype=dtype, timeout=timeout, return_errors=return_errors)
        return self._run(call)

    def release(self, digests: Iterable[bytes], *, timeout: float | None = None) -> int:
        """As `AsyncClient.release`."""
        return self._run(self._client.release(digests, timeout=timeout))

    @overload
    def plan(
        self, sizes: Iterable[SizeSource], *, timeout: float | None = ..., return_errors: Literal[False] = ...
    ) -> list[ItemPlan]: ...

    @overload
    def plan(
        self, sizes: Iterable[SizeSource], *, timeout: float | None = ..., return_errors: bool
    ) -> list[ItemPlan | ServerError]: ...

    def plan(
        self, sizes: Iterable[SizeSource], *, timeout: float | None = None, return_errors: bool = False
    ) -> list[Any]:
        """As `AsyncClient.plan`."""
        return self._run(self._client.plan(sizes, timeout=timeout, return_errors=return_errors))

    def info(self, *, timeout: float | None = None) -> pb.GetServerInfoResponse:
        """As `AsyncClient.info`."""
        return self._run(self._client.info(timeout=timeout))

    def health(self, service: str = "", *, timeout: float | None = None) -> str:
        """As `AsyncClient.health`."""
        return self._run(self._client.health(service, timeout=timeout))

    async def _live(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        """Life of the loop: `asyncio.run` cancels and closes behind it what callers left open."""
        async with self._client:
            started.set_result(asyncio.get_running_loop())
            await self._stop.wait()

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        """Runs a call on the loop and waits. An interrupt of the waiting thread cancels the call."""
        if not self._thread.is_alive():
            call.close()
            raise RuntimeError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()
