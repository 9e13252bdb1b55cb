"""Every row of the table of failures as its caller sees it. gRPC's own refusals are in test_encode.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from fake_engine import SharingEngine
from frontend_harness import READY, Answer, Harness, collect, details_of, picture, raw_item, reason_of, serving, until
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve_server.errors import TABLE
from opticnerve_server.messages import Failed, PhaseChange, Refused
from opticnerve_server.preprocess import Preprocessor
from opticnerve_server.types import Phase

FRAME = pb.Frame(raw_image=pb.RawImage(height=8, width=8, data=bytes(192)))
ITEM = raw_item(picture(16, 16))
HOLD = pb.Delivery(hold=pb.Delivery.Hold(reads=1))
STORING: dict[str, Any] = {"store_bytes": 32 << 20, "engine_class": SharingEngine}
GOOD = pb.EncodeRequest(items=[ITEM])
INTERNALS = ("Traceback", "Error(", "/tmp", "/work", ".py", "0x", "opticnerve_server")
MAX_TRAILER_BYTES = 4096


@dataclass
class Call:
    """What brings a call to its end."""

    code: str
    details: set[str]
    request: pb.EncodeRequest = field(default_factory=lambda: GOOD)
    phase: Phase = Phase.READY
    refused: Refused | None = None
    failed: str = ""
    metadata: tuple[tuple[str, str], ...] = ()
    tokens: bool = False


LONG = "x" * 5000
CALLS = {
    "REQUEST_INVALID": Call("INVALID_ARGUMENT", {"BadRequest"}, pb.EncodeRequest()),
    "REQUEST_TOO_LARGE": Call("INVALID_ARGUMENT", {"BadRequest"}, pb.EncodeRequest(items=[ITEM] * 5)),
    "MODEL_NOT_LOADED": Call("NOT_FOUND", {"ResourceInfo"}, pb.EncodeRequest(items=[ITEM], model=LONG)),
    "FINGERPRINT_MISMATCH": Call(
        "FAILED_PRECONDITION", {"PreconditionFailure"}, pb.EncodeRequest(items=[ITEM], fingerprint=LONG)
    ),
    "QUEUE_FULL": Call("RESOURCE_EXHAUSTED", {"RetryInfo", "QuotaFailure"}, refused=Refused(0, "tokens", 9, 8, 0.5)),
    "LOADING": Call("UNAVAILABLE", {"RetryInfo"}, phase=Phase.LOADING),
    "CAPTURING_GRAPHS": Call("UNAVAILABLE", {"RetryInfo"}, phase=Phase.CAPTURING),
    "GPU_FAULT": Call("UNAVAILABLE", {"RetryInfo"}, failed="GPU_FAULT"),
    "EXPIRED_IN_QUEUE": Call("DEADLINE_EXCEEDED", set(), failed="EXPIRED_IN_QUEUE"),
    "TOKEN_MISSING": Call("UNAUTHENTICATED", set(), tokens=True),
    "TOKEN_INVALID": Call("UNAUTHENTICATED", set(), tokens=True, metadata=(("authorization", f"Bearer {LONG}"),)),
}


@pytest.mark.parametrize("reason", CALLS)
async def test_a_call(reason: str, tmp_path: Path) -> None:
    row = CALLS[reason]
    settings: dict[str, Any] = {"max_queue_items": 4}
    if row.tokens:
        (tmp_path / "tokens").write_text("red:red-token-0123456789")
        settings["auth_token_file"] = str(tmp_path / "tokens")
    async with serving(ready=False, **settings) as server:
        server.tell(READY, PhaseChange(row.phase))
        await until(lambda: server.frontend.state.ready is not None and server.frontend.state.model is not None)
        await until(lambda: server.frontend.state.phase is row.phase)
        server.engine.refuse = row.refused
        if row.failed:
            server.engine.fail = {0: Failed(0, 0, row.failed, "told by the engine")}
        await assert_refused(server, reason, row)


async def test_draining() -> None:
    async with serving() as server:
        server.frontend.state.stopping = True
        await assert_refused(server, "DRAINING", Call("UNAVAILABLE", {"RetryInfo"}))


async def test_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("the secret of /work/secret.py")

    async with serving() as server:
        monkeypatch.setattr(Preprocessor, "plan_items", broken)
        message = await assert_refused(server, "INTERNAL", Call("INTERNAL", {"RequestInfo"}))
    assert "secret" not in message


async def assert_refused(server: Harness, reason: str, row: Call) -> str:
    """The call ends as its row says; the message."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(server.stub.Encode(row.request, metadata=(("x-request-id", "r-1"), *row.metadata)))
    return assert_status(caught.value, reason, row)


def assert_status(error: grpc.aio.AioRpcError, reason: str, row: Call) -> str:
    message = str(error.details())
    assert (error.code().name, reason_of(error)) == (row.code, reason)
    assert set(details_of(error)) == {"ErrorInfo", *row.details}
    assert message
    assert not [word for word in INTERNALS if word in message]
    trailers: Any = error.trailing_metadata() or ()
    assert dict(trailers)["x-request-id"] == "r-1"
    assert sum(len(key) + len(value) for key, value in trailers) + len(message) < MAX_TRAILER_BYTES
    return message


ITEMS: dict[str, tuple[str, pb.Item]] = {
    "IMAGE_INVALID": ("INVALID_ARGUMENT", pb.Item(encoded_image=pb.EncodedImage(data=b"no image"))),
    "ITEM_TOO_LARGE": ("INVALID_ARGUMENT", raw_item(picture(64, 64))),
    "NOT_CACHED": ("NOT_FOUND", pb.Item(digest=pb.Digest(sha256=bytes(32)))),
    "UNIMPLEMENTED": ("UNIMPLEMENTED", pb.Item(frame_list=pb.FrameList(frames=[FRAME] * 2, fps=1.0))),
    "GPU_MEMORY": ("RESOURCE_EXHAUSTED", ITEM),
    "NON_FINITE_OUTPUT": ("DATA_LOSS", ITEM),
}


@pytest.mark.parametrize("reason", ITEMS)
async def test_an_item(reason: str) -> None:
    code, item = ITEMS[reason]
    settings: dict[str, Any] = {"NOT_CACHED": STORING, "UNIMPLEMENTED": {"modalities": "image"}}.get(reason, {})
    async with serving(max_item_tokens=16, **settings) as server:
        if item is ITEM:
            server.engine.fail = {0: Failed(0, 0, reason, "told by the engine")}
        neighbour = raw_item(picture(16, 16, seed=1))
        answers = await collect(server.stub.Encode(pb.EncodeRequest(items=[item, neighbour])))
    assert_failed(answers[0], reason, code)
    assert answers[1].finished is not None, "the neighbour"


async def test_a_store_without_room() -> None:
    async with serving(**STORING) as server:
        assert isinstance(server.engine, SharingEngine)
        server.engine.ledger.store.max_bytes = 4096  # a page: the rows of one of the two
        request = pb.EncodeRequest(items=[ITEM, raw_item(picture(16, 16, seed=1))], delivery=HOLD)
        answers = await collect(server.stub.Encode(request))
    assert_failed(answers[1], "STORE_FULL", "RESOURCE_EXHAUSTED")


async def test_a_reader_that_stalls() -> None:
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 << 10)]
    async with serving(stream_stall_timeout=0.3, channel_options=narrow) as server:
        large = pb.EncodeRequest(items=[raw_item(picture(1024, 1024))] * 2, dtype=pb.DTYPE_FLOAT32)
        call = server.stub.Encode(large, metadata=(("x-request-id", "r-1"),))
        await until(lambda: not server.engine.slots and bool(server.engine.released))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
    assert_status(caught.value, "SLOW_READER", Call("RESOURCE_EXHAUSTED", set()))


def test_every_row_is_here() -> None:
    assert {*CALLS, *ITEMS, "DRAINING", "INTERNAL", "STORE_FULL", "SLOW_READER"} == set(TABLE)


def assert_failed(answer: Answer, reason: str, code: str) -> None:
    """The item ends as its row says."""
    failed = answer.failed
    assert failed is not None
    assert failed.HasField("retry_after") is (TABLE[reason].retry_after is not None)
    assert failed.message
    assert (grpc.StatusCode[code].value[0], reason) == (failed.code, failed.reason)
    assert not [word for word in INTERNALS if word in failed.message]
    assert failed.ByteSize() < MAX_TRAILER_BYTES
