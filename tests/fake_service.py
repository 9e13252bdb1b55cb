"""A real gRPC server that plays scripted answers, for the tests of the client."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import ml_dtypes
import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from opticnerve.v1 import encoder_pb2 as pb
from opticnerve.v1 import encoder_pb2_grpc

SERVICE = "opticnerve.v1.EncoderService"
WIRE_DTYPES = {
    "bfloat16": (pb.DTYPE_BFLOAT16, np.dtype(ml_dtypes.bfloat16)),
    "float16": (pb.DTYPE_FLOAT16, np.dtype(np.float16)),
    "float32": (pb.DTYPE_FLOAT32, np.dtype(np.float32)),
}


@dataclass(frozen=True)
class Abort:
    """Ends the call with this status."""

    code: grpc.StatusCode
    reason: str = ""
    message: str = "as scripted"
    retry_after: float | None = None
    metadata: dict[str, str] = field(default_factory=dict)

    def status(self) -> status_pb2.Status:
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        if self.reason:
            info = error_details_pb2.ErrorInfo(reason=self.reason, domain="opticnerve", metadata=self.metadata)
            status.details.add().Pack(info)
        if self.retry_after is not None:
            delay = Duration()
            delay.FromNanoseconds(int(self.retry_after * 1e9))
            status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        return status


@dataclass(frozen=True)
class Sleep:
    """Says nothing for so many seconds."""

    seconds: float


Step = pb.EncodeResponse | Abort | Sleep
Script = Callable[[pb.EncodeRequest], Iterable[Step]]


class FakeService(encoder_pb2_grpc.EncoderServiceServicer):
    """Plays one script for each call of Encode, the last one again and again, and keeps the requests."""

    def __init__(self, *scripts: Script, info: pb.GetServerInfoResponse | None = None) -> None:
        self._scripts = list(scripts)
        self.info = info or pb.GetServerInfoResponse(phase=pb.PHASE_READY)
        self.encode_requests: list[pb.EncodeRequest] = []
        self.peers: list[str] = []  # of the calls of Encode
        self.digests: list[str | None] = []  # the metadata of that name, of each call of Encode and Release
        self.plan_requests: list[pb.PlanItemsRequest] = []
        self.plan: Callable[[pb.PlanItemsRequest], pb.PlanItemsResponse] = lambda _: pb.PlanItemsResponse()
        self.cancelled = asyncio.Event()

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> AsyncIterator[pb.EncodeResponse]:
        self.encode_requests.append(request)
        self.peers.append(context.peer())
        self.digests.append(dict(context.invocation_metadata()).get("opticnerve-digest"))
        script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        try:
            for step in script(request):
                if isinstance(step, Abort):
                    await context.abort_with_status(rpc_status.to_status(step.status()))
                elif isinstance(step, Sleep):
                    await asyncio.sleep(step.seconds)
                else:
                    yield step
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def PlanItems(self, request: pb.PlanItemsRequest, context: Any) -> pb.PlanItemsResponse:
        self.plan_requests.append(request)
        return self.plan(request)

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        self.digests.append(dict(context.invocation_metadata()).get("opticnerve-digest"))
        return pb.ReleaseResponse(released=len(request.digests))

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        return self.info


@asynccontextmanager
async def serving(
    service: FakeService, *, healthy: bool = True, max_request_bytes: int = 32 << 20
) -> AsyncIterator[str]:
    """Serves on a free port of the loopback; the value is "host:port"."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", max_request_bytes)])
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(service, server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    status = health_pb2.HealthCheckResponse.SERVING if healthy else health_pb2.HealthCheckResponse.NOT_SERVING
    await health_servicer.set("", status)
    await health_servicer.set(SERVICE, status)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def rows_of(item: pb.Item, dtype: str = "bfloat16", *, tokens: int = 6, width: int = 8) -> np.ndarray[Any, Any]:
    """The rows that `answer` gives an item: all numbers are the first byte of its media."""
    media = getattr(item, str(item.WhichOneof("media")))
    return np.full((tokens, width), media.data[0], WIRE_DTYPES[dtype][1])


def started(position: int, rows: np.ndarray[Any, Any], *, deepstack_levels: int = 0) -> pb.EncodeResponse:
    tokens, width = rows.shape
    [wire_dtype] = [wire for wire, dtype in WIRE_DTYPES.values() if dtype == rows.dtype]
    message = pb.EncodeResponse(item_index=position)
    message.started.plan.CopyFrom(image_plan(tokens))
    message.started.layout.CopyFrom(
        pb.Layout(
            dtype=wire_dtype,
            rows=tokens,
            hidden=width // (1 + deepstack_levels),
            deepstack_levels=deepstack_levels,
            projector_applied=True,
        )
    )
    message.started.digest = bytes(range(32))
    message.started.instance_id = "fake-1"
    return message


def chunks(position: int, rows: np.ndarray[Any, Any], *, rows_a_chunk: int = 4) -> list[pb.EncodeResponse]:
    data, step = rows.tobytes(), rows.strides[0] * rows_a_chunk
    return [
        pb.EncodeResponse(item_index=position, chunk=pb.TensorChunk(offset=offset, data=data[offset : offset + step]))
        for offset in range(0, len(data), step)
    ]


def finished(
    position: int, rows: np.ndarray[Any, Any], *dispatches: pb.PathDispatch, crc32: int | None = None
) -> pb.EncodeResponse:
    message = pb.EncodeResponse(item_index=position)
    message.finished.crc32 = zlib.crc32(rows.tobytes()) if crc32 is None else crc32
    message.finished.durations.execute.FromMilliseconds(3)
    message.finished.durations.stream.FromMilliseconds(2)
    message.finished.dispatches.extend(dispatches or [replay()])
    return message


def answer(position: int, rows: np.ndarray[Any, Any], **layout: int) -> list[pb.EncodeResponse]:
    """All messages of an item that succeeds."""
    return [started(position, rows, **layout), *chunks(position, rows), finished(position, rows)]


def failed(position: int, code: grpc.StatusCode, reason: str, retry_after: float | None = None) -> pb.EncodeResponse:
    failure = pb.ItemFailed(code=code.value[0], reason=reason, message="as scripted", metadata={"limit": "7"})
    if retry_after is not None:
        failure.retry_after.FromNanoseconds(int(retry_after * 1e9))
    return pb.EncodeResponse(item_index=position, failed=failure)


def replay(path: str = "default", budget: int = 64) -> pb.PathDispatch:
    return pb.PathDispatch(path=path, outcome=pb.OUTCOME_REPLAY, budget=budget, units=6, batch_items=2, batch_units=12)


def image_plan(tokens: int) -> pb.ItemPlan:
    return pb.ItemPlan(
        grid_thw=pb.GridThw(t=1, h=2, w=2 * tokens),
        merge_size=2,
        processed_height=32,
        processed_width=32 * tokens,
        tokens=tokens,
        spans=[pb.Span(kind=pb.Span.KIND_IMAGE, rows=tokens)],
    )


def answer_all(request: pb.EncodeRequest, order: Sequence[int] | None = None) -> list[Step]:
    """Every item succeeds; they finish in `order`."""
    [dtype] = [name for name, (wire, _) in WIRE_DTYPES.items() if wire == (request.dtype or pb.DTYPE_BFLOAT16)]
    return [
        message
        for position in order or range(len(request.items))
        for message in answer(position, rows_of(request.items[position], dtype))
    ]
