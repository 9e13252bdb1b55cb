"""Load and probes from processes of their own; each prints what it saw as JSON.

python load.py calls ADDRESS FILE COUNT DEADLINE    COUNT calls at once, each with the image in FILE
python load.py open ADDRESS FILE RATE SECONDS       RATE calls a second, whether or not they are answered
python load.py probe ADDRESS                        health checks until its standard input ends
python load.py stall ADDRESS                        one call of megabytes of rows; reads one message, says so, and waits
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from opticnerve.chunks import unpack
from opticnerve.tensors import Receiver
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve.v1 import encoder_pb2_grpc as pb_grpc

NO_RETRIES = [("grpc.enable_retries", 0)]
PAUSE_S = 0.01
DEADLINE_S = 30.0
CONNECTIONS = 8


async def call(stub: Any, data: bytes, deadline: float) -> str:
    """The status of one call; an answer that is not whole is none."""
    receiver = Receiver([0], "bfloat16")
    request = pb.EncodeRequest(items=[pb.Item(encoded_image=pb.EncodedImage(data=data))], dtype=pb.DTYPE_BFLOAT16)
    try:
        async for message in stub.Encode(request, timeout=deadline):
            answer = receiver.receive(unpack(message.SerializeToString()))
            if isinstance(answer, Exception):
                return repr(answer)
        receiver.close()
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def calls(address: str, data: bytes, count: int, deadline: float) -> dict[str, Any]:
    started = time.monotonic()
    async with grpc.aio.insecure_channel(address, options=NO_RETRIES) as channel:
        stub = pb_grpc.EncoderServiceStub(channel)
        codes = await asyncio.gather(*(call(stub, data, deadline) for _ in range(count)))
    return {"codes": {code: codes.count(code) for code in sorted(set(codes))}, "seconds": time.monotonic() - started}


async def open_loop(address: str, data: bytes, rate: float, seconds: float) -> dict[str, Any]:
    """By their status, of all calls when each had ended and how long that took from when it was due, in seconds; and
    how late this process was with them at worst. They take turns on CONNECTIONS connections.
    """
    ended: dict[str, list[tuple[float, float]]] = {}
    late = 0.0

    async def caller(stub: Any, due: float) -> None:
        code = await call(stub, data, DEADLINE_S)
        now = time.monotonic()
        ended.setdefault(code, []).append((now - began, now - due))

    async with AsyncExitStack() as stack:
        options = [*NO_RETRIES, ("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(CONNECTIONS)]
        stubs = [pb_grpc.EncoderServiceStub(await stack.enter_async_context(channel)) for channel in channels]
        began, tasks = time.monotonic(), []
        for number in range(int(rate * seconds)):
            due = began + number / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            late = max(late, time.monotonic() - due)
            tasks.append(asyncio.create_task(caller(stubs[number % CONNECTIONS], due)))
        await asyncio.gather(*tasks)
    return {"ended": ended, "late_s": late}


def probe(address: str) -> dict[str, Any]:
    """Beside the checks, how late this process itself woke up at worst: what the machine did to a sleeping process."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    seconds, serving, late = [], True, 0.0
    with grpc.insecure_channel(address, options=NO_RETRIES) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        request = health_pb2.HealthCheckRequest(service="readiness")
        check(request, timeout=10)  # connected
        slept = time.perf_counter()
        while not ended.wait(PAUSE_S):
            started = time.perf_counter()
            late = max(late, started - slept - PAUSE_S)
            serving &= check(request, timeout=10).status == health_pb2.HealthCheckResponse.SERVING
            slept = time.perf_counter()
            seconds.append(slept - started)
    p99 = sorted(seconds)[len(seconds) * 99 // 100]
    return {"checks": len(seconds), "p99_s": p99, "slowest_s": max(seconds), "always_serving": serving, "late_s": late}


def stall(address: str) -> None:
    # By itself gRPC widens its window with what it measures, until it holds what nobody reads.
    narrow = [*NO_RETRIES, ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 << 10)]
    image = pb.RawImage(height=1024, width=1024, data=bytes(3 << 20))
    request = pb.EncodeRequest(items=[pb.Item(raw_image=image)] * 6, dtype=pb.DTYPE_FLOAT32)
    with grpc.insecure_channel(address, options=narrow) as channel:
        # Several, as the sockets' buffers can hold all rows of one.
        calls = [pb_grpc.EncoderServiceStub(channel).Encode(request) for _ in range(3)]
        next(calls[0])
        print("reading", flush=True)
        time.sleep(600)


COMMANDS = {"calls": calls, "open": open_loop}


def main(command: str, address: str, *arguments: str) -> None:
    if command == "probe":
        print(json.dumps(probe(address)))
    elif command == "stall":
        stall(address)
    else:
        file, count, seconds = arguments
        run = COMMANDS[command](address, Path(file).read_bytes(), int(count), float(seconds))
        print(json.dumps(asyncio.run(run)))


if __name__ == "__main__":
    main(*sys.argv[1:])
