"""A front-end process: one of N on one port. Its asyncio loop does gRPC and nothing else.

The port answers, NOT_SERVING, before torch is imported. What the server does is heard over the control socket.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from . import messages
from .admission import Admission
from .config import Config
from .credentials import NOTHING_KNOWN, Credentials
from .info import Model, ServerState
from .media import CONTRACT
from .messages import EngineReady, FrontendAlive, FrontendReady, Occupancy, PhaseChange, Stop
from .ports import advertised
from .preprocess import Preprocessor
from .processes import settle
from .service import EncoderService
from .slots import Arena
from .transport import HealthServicer, add_port, build_server, publish_health
from .types import Phase

BEAT_S = 1.0
"""Between two signs of life to the supervisor."""

FAREWELL_S = 1.0
"""Time for the last statuses to reach their callers once no call is inside."""

_log = logging.getLogger(__name__)


def main(
    config: Config,
    index: int,
    control: socket.socket,
    engine: socket.socket,
    arena_fd: int,
    address: str,
    instance_id: str,
    good: Credentials,
) -> None:
    """Serve on `address` ("host:port") until told to stop. Exits with 0 then, with 1 if the supervisor is gone.

    The process has been made a child of the supervisor (`processes.prepare`) and sees no CUDA device.
    """
    arena = Arena(arena_fd, config.arena_bytes)
    raise SystemExit(asyncio.run(_serve(config, index, control, engine, arena, address, instance_id, good)))


async def _serve(
    config: Config,
    index: int,
    control: socket.socket,
    engine: socket.socket,
    arena: Arena,
    address: str,
    instance_id: str,
    good: Credentials,
) -> int:
    frontend = Frontend(config, control, engine, arena, instance_id, good=good)
    await frontend.start(address)
    _log.info("front-end listening", extra={"address": address, "frontend": index})
    return await frontend.run()


def open_model(config: Config) -> Model:
    """The planner of the configured model. Imports torch, for seconds, and keeps it to one thread an operation."""
    import torch

    from .models import registry

    torch.set_num_threads(1)  # the pool's threads are the parallelism
    source = registry.open_model(config.model, config.load_format, projector=config.projector)
    model = Model(source.name, registry.build_planner(source))
    settle()
    return model


class Frontend:
    """The server of one front-end. Made, used and ended on one asyncio loop; takes over both sockets.

    `open_model` is called on another thread once the port answers. `good` holds where secret files are broken now.
    """

    def __init__(
        self,
        config: Config,
        control: socket.socket,
        engine: socket.socket,
        arena: Arena,
        instance_id: str,
        open_model: Callable[[Config], Model] = open_model,
        good: Credentials = NOTHING_KNOWN,
    ) -> None:
        self.state = ServerState(config=config, instance_id=instance_id, decode_contract=CONTRACT)
        self._open_model = open_model
        self._control = control
        self._control.setblocking(False)
        self._admission = Admission(engine, arena)
        self._preprocessor = Preprocessor(config)
        self._service = EncoderService(self.state, self._admission, self._preprocessor)
        self._health = HealthServicer()
        self._server = build_server(self.state, self._service, self._health, good)
        self._good = good
        self._started = False

    async def start(self, address: str) -> int:
        """Bind and answer, NOT_SERVING; the port. Raises RuntimeError when the address cannot be had."""
        await self._publish()  # before the first Check: the servicer is born SERVING
        port = add_port(self._server, address, self.state.config, self._good)
        bound = f"{address.rpartition(':')[0]}:{port}"
        self.state.address = advertised(bound) if self.state.config.advertise == "auto" else self.state.config.advertise
        await self._server.start()
        return port

    async def run(self) -> int:
        """Load the model and follow the supervisor until the end; the exit code.

        Fails if the model does not load, and if a worker thread has died.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(self._speak()), tasks.create_task(self._watch_engine())]
                code = await self._follow()
                for task in beside:
                    task.cancel()
            return code
        finally:
            await self._end()

    async def _speak(self) -> None:
        """Load the model, then give signs of life while there is life to give signs of."""
        self.state.model = await asyncio.to_thread(self._open_model, self.state.config)
        await self._publish()
        message: FrontendReady | FrontendAlive = FrontendReady()
        while True:
            await asyncio.get_running_loop().sock_sendall(self._control, messages.encode(message))
            await asyncio.sleep(BEAT_S)
            self._preprocessor.check()
            message = FrontendAlive()

    async def _watch_engine(self) -> None:
        """The engine's end fails every call; the supervisor decides what comes next."""
        await self._admission.lost.wait()
        _log.error("engine is gone")
        self.state.phase = Phase.FAILED
        await self._publish()

    async def _follow(self) -> int:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(self._control, messages.MAX_MESSAGE_BYTES):
            match messages.decode(data):
                case PhaseChange(phase=phase, detail=detail):
                    if self.state.phase is not Phase.FAILED:
                        self.state.phase, self.state.detail = phase, detail
                    await self._publish()
                case EngineReady() as ready:
                    self.state.ready = ready
                    await self._publish()
                case Occupancy() as occupancy:
                    self.state.occupancy = occupancy
                case Stop(grace=grace):
                    await self._drain(grace)
                    return 0
                case message:
                    raise TypeError(f"{type(message).__name__} is no message for a front-end")
        _log.error("supervisor is gone")
        return 1

    async def _drain(self, grace: float) -> None:
        """Refuse new calls, let those inside finish for up to `grace` seconds."""
        self.state.stopping = True
        await self._health.enter_graceful_shutdown()
        try:
            async with asyncio.timeout(grace):
                await self._service.idle.wait()
        except TimeoutError:
            _log.warning("calls did not finish in time", extra={"grace_s": grace})
            await self._server.stop(0)
        else:
            await self._server.stop(FAREWELL_S)

    async def _end(self) -> None:
        await self._server.stop(0)
        await asyncio.to_thread(self._preprocessor.close)
        self._admission.close()
        self._control.close()

    async def _publish(self) -> None:
        phase = self.state.shown_phase
        self._started |= phase is Phase.READY
        await publish_health(self._health, phase, self._started)
