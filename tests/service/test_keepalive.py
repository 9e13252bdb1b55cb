"""Callers that ping: as often as the server's options allow they are left alone, more often they are sent away.

Spoken in frames of HTTP/2, for a gRPC client would not ping that often.
"""

from __future__ import annotations

import asyncio
import struct

import pytest

from frontend_harness import serving
from opticnerve_server import transport
from opticnerve_server.config import Config

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
ENHANCE_YOUR_CALM = 11
PINGS, EVERY_S = 8, 0.1
ALLOWED = "grpc.http2.min_ping_interval_without_data_ms"


def frame(kind: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, 0, 0) + payload


async def pinging(address: str) -> tuple[int, list[int]]:
    """Of a connection that only pings: how many of its pings were answered, and the errors of the GOAWAYs it got."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    acknowledged, errors = 0, []

    async def read() -> None:
        nonlocal acknowledged
        while head := await reader.read(9):
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            acknowledged += head[3] == PING
            if head[3] == GOAWAY:
                errors.append(int.from_bytes(payload[4:8], "big"))

    reading = asyncio.create_task(read())
    writer.write(PREFACE + frame(SETTINGS))
    for number in range(PINGS):
        writer.write(frame(PING, number.to_bytes(8, "big")))
        await asyncio.sleep(EVERY_S)
        if reading.done():
            break
    reading.cancel()
    writer.close()
    return acknowledged, errors


async def test_pings_faster_than_allowed_end_the_connection() -> None:
    async with serving() as server:
        _, errors = await pinging(server.address)
    assert errors == [ENHANCE_YOUR_CALM]


async def test_the_option_is_spelt_as_grpc_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = transport.server_options

    def shorter(config: Config) -> list[tuple[str, int]]:
        options = dict(shipped(config))
        assert options[ALLOWED] == 10_000
        return [*(options | {ALLOWED: 50}).items()]

    monkeypatch.setattr(transport, "server_options", shorter)
    async with serving() as server:
        assert await pinging(server.address) == (PINGS, [])
