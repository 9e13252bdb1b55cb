"""The child processes of the supervisor: how they are spawned, told things and ended.

Children are spawned, not forked: the supervisor has threads, and imports neither torch nor the models' code, which a
child imports for itself inside its target function.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from multiprocessing import reduction
from typing import Any

from . import messages, telemetry, tracing
from .config import Config
from .credentials import Credentials

log = logging.getLogger(__name__)

EngineTarget = Callable[[Config, socket.socket, int], None]
"""Called in the engine with: the configuration, the control socket, the file descriptor of the arena."""

FrontendTarget = Callable[[Config, int, socket.socket, socket.socket, int, str, str, Credentials], None]
"""Called in a front-end with: the configuration, its index, the control socket, the engine's socket, the file
descriptor of the arena, the address to bind, the instance id, the last good credentials."""

_PR_SET_PDEATHSIG = 1


def run_engine(config: Config, control: socket.socket, arena_fd: int) -> None:
    """The life of the engine process."""
    # Threads that wait for each other within an operation sleep. Spinning, their default, they take the cores of the
    # decoders: 0.5 instead of 0.24 s of CPU time a 1080p image, measured on 2 busy cores. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    prepare("engine")
    from . import engine

    engine.main(config, control, arena_fd)


def run_frontend(
    config: Config,
    index: int,
    control: socket.socket,
    engine: socket.socket,
    arena_fd: int,
    address: str,
    instance_id: str,
    good: Credentials,
) -> None:
    """The life of a front-end process."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything could look: the GPU belongs to the engine alone
    prepare(f"frontend-{index}")
    from . import frontend

    frontend.main(config, index, control, engine, arena_fd, address, instance_id, good)


def run_sglang(config: Config, control: socket.socket, addresses: Mapping[str, str]) -> None:
    """The life of the front for SGLang."""
    prepare("sglang")
    from . import sglang

    sglang.main(config, control, addresses)


def prepare(name: str) -> None:
    """Make this process a child of the supervisor: it stops when told over its control socket, and dies with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    telemetry.set_up(name)
    tracing.set_up(name)


def settle() -> None:
    """All that the process has now stays: the garbage collector no longer looks at it.

    Looking at what torch consists of takes 0.1 s of every full collection, during which no call is answered and nothing
    is launched.
    """
    gc.collect()
    gc.freeze()


class _InheritedFd:
    """A file descriptor among the arguments of a spawned process; arrives there as an int."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (reduction.DupFd(self._fd),)


def _arrived(inherited: Any) -> int:
    fd: int = inherited.detach()
    return fd


class Child:
    """A running child and the supervisor's end of its control socket. For one thread."""

    def __init__(self, name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Spawn `target(*arguments)`; in `arguments`, Child.CONTROL stands for the control socket."""
        self.name = name
        self.control, theirs = messages.socket_pair()
        self.control.setblocking(False)
        arguments = tuple(theirs if argument is Child.CONTROL else argument for argument in arguments)
        self.process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, name=name)
        self.process.start()
        theirs.close()
        self.silent = False  # whether its end of the socket is closed: it sends nothing any more
        self.ready = False  # whether it has said FrontendReady
        self.heard_at = time.monotonic()  # when it was last heard, or born
        self._told_to_stop = False

    CONTROL = object()

    def send(self, message: messages.Message, fd: int | None = None) -> None:
        """Tell the child something, with a file descriptor beside it.

        A child that is dying misses it, which its sentinel reports. One that has stopped reading misses an Occupancy,
        for the next one tells more; it is killed over anything else. One that was told to stop may be gone.
        """
        try:
            if fd is None:
                self.control.send(messages.encode(message))
            else:
                socket.send_fds(self.control, [messages.encode(message)], [fd])
            self._told_to_stop |= isinstance(message, messages.Stop)
        except BlockingIOError:
            if not isinstance(message, messages.Occupancy):
                log.error("child does not read its messages", extra={"child": self.name})
                self.kill()
        except (BrokenPipeError, ConnectionResetError):
            if not self._told_to_stop:
                log.warning("child is gone", extra={"child": self.name, "message_type": type(message).__name__})

    def receive(self) -> messages.Message | None:
        """The next message, or None when there is none, now or, if `silent`, for ever."""
        try:
            data = self.control.recv(messages.MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            data = b""
        self.silent = not data
        self.heard_at = time.monotonic()
        return messages.decode(data) if data else None

    def wait(self, timeout: float) -> bool:
        """Whether the child has ended within `timeout` seconds."""
        self.process.join(timeout)
        return self.process.exitcode is not None

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        """Release what is held of a child that has ended."""
        self.process.join()
        self.process.close()
        self.control.close()


def inherited_fd(fd: int) -> Any:
    """An argument for `Child` that arrives as a file descriptor of its own."""
    return _InheritedFd(fd)
