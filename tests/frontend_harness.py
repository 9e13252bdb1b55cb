"""A front-end in this process, with a fake engine behind it, a fake supervisor above it and a real channel in front."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import Any

import grpc.aio
import numpy as np
import numpy.typing as npt
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fake_engine import FakeEngine
from fake_planner import FakePlanner
from opticnerve.channel import Tls
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve.v1 import encoder_pb2_grpc as pb_grpc
from opticnerve_server import messages
from opticnerve_server.config import Config
from opticnerve_server.credentials import NOTHING_KNOWN, Credentials
from opticnerve_server.frontend import Frontend
from opticnerve_server.info import Model
from opticnerve_server.messages import EngineReady, PathState, PhaseChange, Stop
from opticnerve_server.slots import Arena
from opticnerve_server.types import Phase

READY = EngineReady(
    fingerprint="fp-1",
    dtype="bfloat16",
    device="cpu",
    attention_backend="sdpa",
    paths=[PathState("default", [64, 128], 2, 4096, 0.5)],
    reasons={"dtype": "cpu"},
    model="tiny",
    architecture=FakePlanner.architecture,
    layout=FakePlanner.layout,
    modalities=FakePlanner.modalities,
)


@dataclass
class Harness:
    engine: FakeEngine
    frontend: Frontend
    control: socket.socket
    run: asyncio.Task[int]
    channel: grpc.aio.Channel
    address: str

    @property
    def stub(self) -> pb_grpc.EncoderServiceAsyncStub:
        return pb_grpc.EncoderServiceStub(self.channel)  # type: ignore[return-value]

    def tell(self, *said: messages.Message) -> None:
        """As the supervisor."""
        for message in said:
            self.control.send(messages.encode(message))

    async def check(self, name: str = "") -> str:
        """The answer of a health check."""
        answer = await health_pb2_grpc.HealthStub(self.channel).Check(health_pb2.HealthCheckRequest(service=name))
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    async def until_serving(self) -> None:
        """Return when a Watch says so."""
        watch = health_pb2_grpc.HealthStub(self.channel).Watch(health_pb2.HealthCheckRequest())
        async for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                break
        watch.cancel()


@asynccontextmanager
async def serving(
    *,
    ready: bool = True,
    exit_code: int = 0,
    open_model: Callable[[Config], Model] | None = None,
    engine_class: type[FakeEngine] = FakeEngine,
    channel_options: Sequence[tuple[str, int]] = (),
    tls: Tls | None = None,
    good: Credentials = NOTHING_KNOWN,
    **settings: object,
) -> AsyncIterator[Harness]:
    """A harness that serves, or with ready=False one that was told nothing yet. At the end every slot is back."""
    defaults = {
        "frontends": 1,
        "preprocess_threads": 2,
        "max_queue_bytes": 32 << 20,
        "max_request_bytes": 16 << 20,
        "store_bytes": 0,
    }
    config = Config(model="tiny", **(defaults | settings))  # type: ignore[arg-type]
    control, theirs = messages.socket_pair()
    with closing(engine_class(FakePlanner.layout.width, config.arena_bytes)) as engine, control:
        frontend = Frontend(
            config,
            theirs,
            engine.frontend_end,
            Arena(engine.arena_fd, engine.size),
            "instance-1",
            open_model or (lambda config: Model("tiny", FakePlanner())),
            good,
        )
        port = await frontend.start("127.0.0.1:0")
        run = asyncio.create_task(frontend.run())
        try:
            address = f"127.0.0.1:{port}"
            if tls is None:
                opened = grpc.aio.insecure_channel(address, channel_options)
            else:
                opened = grpc.aio.secure_channel(address, tls.credentials(), channel_options)
            async with opened as channel:
                harness = Harness(engine, frontend, control, run, channel, address)
                if ready:
                    harness.tell(READY, PhaseChange(Phase.READY))
                    await harness.until_serving()
                yield harness
                await until(lambda: not engine.slots)
        finally:
            if not run.done():
                harness.tell(Stop(5.0))
            assert await run == exit_code
        engine.check()
        assert not leftover_tasks()


def leftover_tasks() -> list[str]:
    """Tasks of the request path that are still alive."""
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return [name for name in names if name.startswith(("EncoderService", "Call", "Admission", "Preprocessor"))]


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something that another thread or task brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.005)


async def until_gone(server: Harness) -> None:
    """Return when nothing of any call is left inside."""
    await until(server.frontend._service.idle.is_set)
    await until(lambda: not server.engine.slots)
    await until(lambda: not leftover_tasks())


class Gate:
    """Holds threads at the start of a function."""

    def __init__(self) -> None:
        self.inside = 0
        self.open = threading.Event()

    def before(self, function: Callable[..., object]) -> Callable[..., object]:
        def waiting(*args: object, **options: object) -> object:
            self.inside += 1
            assert self.open.wait(10)
            return function(*args, **options)

        return waiting


def picture(height: int, width: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def raw_item(pixels: npt.NDArray[np.uint8]) -> pb.Item:
    height, width, _ = pixels.shape
    return pb.Item(raw_image=pb.RawImage(height=height, width=width, data=pixels.tobytes()))


def png_item(pixels: npt.NDArray[np.uint8]) -> pb.Item:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return pb.Item(encoded_image=pb.EncodedImage(data=file.getvalue()))


@dataclass
class Answer:
    """Everything that was said of one item."""

    started: pb.ItemStarted | None = None
    data: bytes = b""
    chunks: int = 0
    finished: pb.ItemFinished | None = None
    failed: pb.ItemFailed | None = None


async def collect(call: AsyncIterable[pb.EncodeResponse]) -> dict[int, Answer]:
    """The answers of a call by index, in the order of their ends. Asserts the contract of the order of messages."""
    answers: dict[int, Answer] = {}
    current: int | None = None
    async for response in call:
        index, event = response.item_index, response.WhichOneof("event")
        assert response.ByteSize() <= (1 << 20) + 1024
        if current is None:
            assert index not in answers, "an item is answered once"
            answers[index] = Answer()
        else:
            assert index == current, "items do not interleave"
        answer = answers[index]
        current = index
        match event:
            case "started":
                assert answer.started is None
                answer.started = response.started
            case "chunk":
                assert answer.started is not None
                assert response.chunk.offset == len(answer.data)
                answer.data += response.chunk.data
                answer.chunks += 1
            case "finished":
                assert answer.started is not None
                answer.finished, current = response.finished, None
            case "failed":
                answer.failed, current = response.failed, None
    assert current is None, "the call ended inside an item"
    return answers


def details_of(error: grpc.aio.AioRpcError) -> dict[str, object]:
    """The typed details of a failed call by the name of their type."""
    status = _status(error)
    found: dict[str, object] = {}
    for packed in status.details:
        kind = packed.TypeName().removeprefix("google.rpc.")
        detail = getattr(error_details_pb2, kind)()
        assert packed.Unpack(detail)
        found[kind] = detail
    return found


def _status(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    pairs: Any = error.trailing_metadata() or ()
    for key, value in pairs:
        if key == "grpc-status-details-bin":
            status = status_pb2.Status.FromString(value)
            assert status.code == error.code().value[0]
            assert status.message == error.details()
            assert len(value) < 4096
            return status
    raise AssertionError("the call failed without details")


def reason_of(error: grpc.aio.AioRpcError) -> str:
    info = details_of(error)["ErrorInfo"]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert info.domain == "opticnerve"
    return str(info.reason)
