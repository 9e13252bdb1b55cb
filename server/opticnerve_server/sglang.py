"""The process of the front for SGLang: a caller of the service like any other, only that it is started with it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping

from opticnerve.integrations.sglang.front import Front, FrontSettings
from opticnerve.integrations.sglang.gate import parse_networks

from . import messages
from .config import Config
from .messages import Stop


def main(config: Config, control: socket.socket, addresses: Mapping[str, str]) -> None:
    """Serve until told to stop; `addresses` are the service's and its own, by setting. Exits with 1 if the supervisor
    is gone.

    The process has been made a child of the supervisor (`processes.prepare`).
    """
    assert config.sglang_version is not None
    settings = FrontSettings(
        service=addresses["listen"],
        release=config.sglang_version,
        listen=addresses.get("sglang_listen", ""),
        grpc_listen=addresses.get("sglang_grpc_listen", ""),
        networks=parse_networks(config.sglang_receivers),
        max_request_bytes=config.max_request_bytes,
    )
    raise SystemExit(asyncio.run(_serve(settings, control)))


async def _serve(settings: FrontSettings, control: socket.socket) -> int:
    control.setblocking(False)
    async with Front(settings) as front:
        while data := await asyncio.get_running_loop().sock_recv(control, messages.MAX_MESSAGE_BYTES):
            match messages.decode(data):
                case Stop(grace=grace):
                    await front.stop(grace)
                    return 0
    return 1
