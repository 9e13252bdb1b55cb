"""Many calls on one connection: refused by us, with a hint, and never by gRPC; and a caller that opens without end."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import grpc.aio

from fake_engine import FakeEngine
from frontend_harness import collect, details_of, picture, raw_item, serving, until, until_gone
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve.v1 import encoder_pb2_grpc as pb_grpc
from opticnerve_server import messages
from opticnerve_server.messages import Refused, Reserve

QUEUE, CALLS = 8, 500
REQUEST = pb.EncodeRequest(items=[raw_item(picture(16, 16))])

RESETS, AT_ONCE, FLOODS = 20_000, 50, 8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM, SETTINGS = 1, 3, 4
ACK, END_HEADERS = 1, 4
CANCEL = struct.pack(">I", 8)


class SmallEngine(FakeEngine):
    """Holds QUEUE items and refuses the rest."""

    def _handle(self, message: messages.Message) -> None:
        full = isinstance(message, Reserve) and len(self.slots) >= QUEUE
        self.refuse = Refused(0, "items", 1, QUEUE, 0.5) if full else None
        super()._handle(message)


async def test_calls_beyond_the_queue_are_told_when_to_come_again() -> None:
    options = (("grpc.enable_retries", 0),)
    async with serving(engine_class=SmallEngine, channel_options=options, max_queue_items=QUEUE) as server:

        async def end() -> str:
            try:
                await collect(server.stub.Encode(REQUEST, timeout=60))
            except grpc.aio.AioRpcError as error:
                return "refused" if "RetryInfo" in details_of(error) else error.code().name
            return "OK"

        server.engine.hold_rows = True
        calls = [asyncio.create_task(end()) for _ in range(CALLS)]
        await until(lambda: sum(call.done() for call in calls) >= CALLS - QUEUE, seconds=60)
        server.engine.resume()
        assert Counter(await asyncio.gather(*calls)) == {"OK": QUEUE, "refused": CALLS - QUEUE}


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Of HTTP/2 (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header(name: str, value: str) -> bytes:
    """Literal, never indexed by who reads it (RFC 7541, section 6.2.2)."""
    return b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))


def open_and_reset(address: str, count: int) -> None:
    """Begin so many calls on one connection and take each back at once."""
    wanted = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/opticnerve.v1.EncoderService/Encode",
        ":authority": "any",
    }
    block = b"".join(
        header(*pair) for pair in (wanted | {"te": "trailers", "content-type": "application/grpc"}).items()
    )
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0))
        assert connection.recv(1 << 16)[3] == SETTINGS
        connection.sendall(frame(SETTINGS, ACK, 0))
        for first in range(1, 2 * count, 2 * AT_ONCE):
            streams = range(first, first + 2 * AT_ONCE, 2)
            connection.sendall(
                b"".join(frame(HEADERS, END_HEADERS, s, block) + frame(RST_STREAM, 0, s, CANCEL) for s in streams)
            )


async def test_floods_of_many_connections_end_nobody_elses_call() -> None:
    async with serving(max_queue_items=QUEUE) as server:

        def call() -> int:
            with grpc.insecure_channel(server.address) as channel:
                return len(list(pb_grpc.EncoderServiceStub(channel).Encode(REQUEST, timeout=60)))

        with ThreadPoolExecutor(2 * FLOODS) as threads:
            floods = [threads.submit(open_and_reset, server.address, RESETS) for _ in range(FLOODS)]
            calls = [asyncio.wrap_future(threads.submit(call)) for _ in range(FLOODS)]
            await asyncio.sleep(0.02)
            time.sleep(1)  # noqa: ASYNC251 - the event loop is late, as on a busy machine, and all of them wait for it
            assert all(await asyncio.gather(*calls))
            await asyncio.gather(*map(asyncio.wrap_future, floods))


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def test_calls_that_are_taken_back_at_once_cost_nothing() -> None:
    async with serving(max_queue_items=QUEUE) as server:
        await asyncio.to_thread(open_and_reset, server.address, RESETS)  # allocators and pools grow once
        await until_gone(server)
        before = resident_mib()
        flood = asyncio.create_task(asyncio.to_thread(open_and_reset, server.address, RESETS))
        while not flood.done():
            async with asyncio.timeout(5):
                assert await server.check() == "SERVING"
                assert (await collect(server.stub.Encode(REQUEST)))[0].finished
        await flood
        await until_gone(server)
        assert resident_mib() < before + 32
