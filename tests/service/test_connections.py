"""Connections: how often callers may ping, and that those which are old are left without harm.

Pings are spoken in frames of HTTP/2, for a gRPC client would not ping that often.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest

import opticnerve
from frontend_harness import picture, serving, until
from opticnerve_server import transport
from opticnerve_server.config import Config
from opticnerve_server.service import EncoderService

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


async def test_callers_move_on_when_their_connection_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that new servers get traffic: no call fails for it, not even one that outlives its connection's age."""
    shipped, peers = transport.server_options, []

    def short(config: Config) -> list[tuple[str, int]]:
        return [*(dict(shipped(config)) | {"grpc.max_connection_age_ms": 200}).items()]

    def seen(service: EncoderService, request: Any, context: Any) -> Any:
        peers.append(context.peer())
        return encode(service, request, context)

    encode = EncoderService.Encode
    monkeypatch.setattr(EncoderService, "Encode", seen)
    monkeypatch.setattr(transport, "server_options", short)
    async with serving() as server, opticnerve.AsyncClient(server.address, timeout=20) as client:

        async def call(seed: int) -> int:
            return len([embedding async for embedding in client.encode([picture(16, 16, seed)])])

        server.engine.hold_rows = True
        long = asyncio.create_task(call(0))
        await until(lambda: len(server.engine.held) == 1)
        await asyncio.sleep(0.5)
        server.engine.resume()
        assert await long == 1
        for seed in range(30):
            assert await call(seed) == 1
            await asyncio.sleep(0.03)
    assert len(peers) == 31, "no call came twice"
    assert len(set(peers)) >= 3
