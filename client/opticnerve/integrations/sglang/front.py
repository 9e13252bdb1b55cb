"""The front: its listeners, from start to stop."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from aiohttp import web

from opticnerve.client import AsyncClient
from opticnerve.integrations.sglang.encoder import Encoder
from opticnerve.integrations.sglang.gate import Gate, Network
from opticnerve.integrations.sglang.http import application
from opticnerve.integrations.sglang.rpc import build_server

FAREWELL_S = 1.0
"""For the last answers to reach their callers."""

_ENVELOPE_BYTES = 64 << 10  # of a request, beside its media

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """Addresses are "host:port"; "" opens no such listener."""

    service: str  # the Opticnerve server
    release: str  # of SGLang, a key of frame.MODALITY_MODULES
    listen: str = ""  # HTTP
    grpc_listen: str = ""
    networks: tuple[Network, ...] = ()  # rows may go there whoever asks
    max_request_bytes: int = 32 << 20  # of the service, which the media of a part must stay below


class Front:
    """Serves from entry until exit; `stop` ends it politely. For one event loop.

    Raises OSError where a listener cannot be had. Ports may be shared with another front's (SO_REUSEPORT).
    """

    def __init__(self, settings: FrontSettings) -> None:
        self._settings = settings

    async def __aenter__(self) -> Self:
        settings = self._settings
        room = settings.max_request_bytes * 4 // 3 + _ENVELOPE_BYTES  # media come in Base64
        self._client = AsyncClient(settings.service, wait_until_ready=False)
        self._encoder = Encoder(self._client, settings.release, Gate(settings.networks))
        self._http = web.AppRunner(
            application(self._encoder, room), handler_cancellation=True, access_log=None, shutdown_timeout=FAREWELL_S
        )
        self._grpc = build_server(self._encoder, room)
        try:
            await self._listen()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def stop(self, grace: float) -> None:
        """Take no more parts, and give those inside `grace` seconds to end."""
        self._encoder.stop()
        try:
            async with asyncio.timeout(grace):
                await self._encoder.idle.wait()
        except TimeoutError:
            _log.warning("parts did not end in time", extra={"grace_s": grace})

    async def _listen(self) -> None:
        await self._http.setup()
        if self._settings.listen:
            host, _, port = self._settings.listen.rpartition(":")
            await web.TCPSite(self._http, host.strip("[]"), int(port), reuse_port=True).start()
        if self._settings.grpc_listen:
            try:
                self._grpc.add_insecure_port(self._settings.grpc_listen)
            except RuntimeError as error:
                raise OSError(f"cannot bind {self._settings.grpc_listen}") from error
            await self._grpc.start()

    async def _close(self) -> None:
        await self._http.cleanup()
        await self._grpc.stop(FAREWELL_S)
        self._encoder.close()
        await self._client.close()
