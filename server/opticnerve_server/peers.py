"""The scheduler's sockets: to the supervisor, and to every front-end and engine that the supervisor hands over."""

from __future__ import annotations

import enum
import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .messages import MAX_MESSAGE_BYTES, Attach, AttachEngine, Message, decode, encode

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 5.0
"""A peer that takes no message for this long, though there are some, is treated as dead."""


class Kind(enum.Enum):
    SUPERVISOR = "supervisor"
    FRONTEND = "front-end"
    ENGINE = "engine"


class Peer(NamedTuple):
    """Whom a socket leads to: a front-end by its index, an engine by its device."""

    kind: Kind
    number: int = 0

    @property
    def named(self) -> dict[str, object]:
        """For the log."""
        return {"peer": self.kind.value, "number": self.number}


SUPERVISOR = Peer(Kind.SUPERVISOR)


@dataclass(slots=True)
class _Line:
    """A peer's socket, and what it has not taken yet."""

    socket: socket.socket
    unsent: deque[bytes] = field(default_factory=deque)
    events: int = selectors.EVENT_READ  # that the selector waits for
    stuck_at: float = 0.0  # time.monotonic() when it counts as dead, if it has taken nothing by then


class Peers:
    """For one thread, which `wait` alone holds up. What a stopped or slow peer does not take is kept for it: no more
    than the items inside give rise to.
    """

    def __init__(self, control: socket.socket) -> None:
        """`control` leads to the supervisor."""
        self._lines: dict[Peer, _Line] = {}
        self._selector = selectors.DefaultSelector()
        self._connect(SUPERVISOR, control)

    def wait(self, timeout: float) -> Sequence[Peer]:
        """Who has something to read; the supervisor last, for what it says may detach others."""
        ready = []
        for key, events in self._selector.select(timeout):
            if events & selectors.EVENT_WRITE:
                self._flush(key.data)
            if events & selectors.EVENT_READ:
                ready.append(key.data)
        return sorted(ready, key=lambda peer: peer == SUPERVISOR)

    def read(self, peer: Peer) -> Message | None:
        """The next message, None if the peer is gone. Whom the supervisor hands over is attached."""
        try:
            if peer.kind is Kind.SUPERVISOR:
                return self._read_supervisor()
            data = self._lines[peer].socket.recv(MAX_MESSAGE_BYTES)
        except OSError:
            data = b""
        return decode(data) if data else None

    def _read_supervisor(self) -> Message | None:
        data, fds, _, _ = socket.recv_fds(self._lines[SUPERVISOR].socket, MAX_MESSAGE_BYTES, 1)
        if not data:
            return None
        message = decode(data)
        match message:
            case Attach(frontend=number):
                self._connect(Peer(Kind.FRONTEND, number), socket.socket(fileno=fds[0]))
            case AttachEngine(device=device):
                self._connect(Peer(Kind.ENGINE, device), socket.socket(fileno=fds[0]))
        return message

    def ignore(self, peer: Peer) -> None:
        """`wait` for nothing of this peer any more; what it has sent can still be read."""
        if self._lines[peer].socket in self._selector.get_map():
            self._selector.unregister(self._lines[peer].socket)

    def detach(self, peer: Peer) -> None:
        """Forget a peer that is gone."""
        self.ignore(peer)
        self._lines.pop(peer).socket.close()

    def send(self, peer: Peer, message: Message) -> None:
        """Send, now or when the peer takes it; one that is gone or stuck is shut down, its end then reads as gone."""
        line = self._lines.get(peer)
        if line is None:
            return
        line.unsent.append(encode(message))
        if len(line.unsent) == 1:
            self._flush(peer)
        elif time.monotonic() > line.stuck_at:
            self._shut_down(peer, f"none taken for {SEND_TIMEOUT_S:g} s")

    def _flush(self, peer: Peer) -> None:
        line, events = self._lines[peer], selectors.EVENT_READ
        try:
            while line.unsent:
                line.socket.send(line.unsent[0])
                line.unsent.popleft()
        except BlockingIOError:
            events |= selectors.EVENT_WRITE
            line.stuck_at = time.monotonic() + SEND_TIMEOUT_S
        except OSError as error:
            self._shut_down(peer, str(error))
        if events != line.events and line.socket in self._selector.get_map():
            line.events = events
            self._selector.modify(line.socket, events, peer)

    def _shut_down(self, peer: Peer, reason: str) -> None:
        log.warning("peer takes no messages", extra={**peer.named, "error": reason})
        line = self._lines[peer]
        line.unsent.clear()
        try:
            line.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.info("peer was gone already", extra=peer.named)

    def _connect(self, peer: Peer, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._lines[peer] = _Line(connection)
        self._selector.register(connection, selectors.EVENT_READ, peer)
