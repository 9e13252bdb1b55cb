"""The scheduler's sockets: to the supervisor, and to every front-end and engine that the supervisor hands over."""

from __future__ import annotations

import enum
import logging
import selectors
import socket
from collections.abc import Sequence
from typing import NamedTuple

from .messages import MAX_MESSAGE_BYTES, Attach, AttachEngine, Message, decode, encode

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 5.0
"""A peer that does not take a small message for this long is treated as dead."""


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


class Peers:
    """For one thread. Sends block until the peer takes the message."""

    def __init__(self, control: socket.socket) -> None:
        """`control` leads to the supervisor."""
        self._sockets = {SUPERVISOR: control}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, SUPERVISOR)

    def wait(self, timeout: float) -> Sequence[Peer]:
        """Who has something to read; the supervisor last, for what it says may detach others."""
        return sorted((key.data for key, _ in self._selector.select(timeout)), key=lambda peer: peer == SUPERVISOR)

    def read(self, peer: Peer) -> Message | None:
        """The next message, None if the peer is gone. Whom the supervisor hands over is attached."""
        try:
            if peer.kind is Kind.SUPERVISOR:
                return self._read_supervisor()
            data = self._sockets[peer].recv(MAX_MESSAGE_BYTES)
        except OSError:
            data = b""
        return decode(data) if data else None

    def _read_supervisor(self) -> Message | None:
        data, fds, _, _ = socket.recv_fds(self._sockets[SUPERVISOR], MAX_MESSAGE_BYTES, 1)
        if not data:
            return None
        message = decode(data)
        match message:
            case Attach(frontend=number):
                self._attach(Peer(Kind.FRONTEND, number), fds[0])
            case AttachEngine(device=device):
                self._attach(Peer(Kind.ENGINE, device), fds[0])
        return message

    def ignore(self, peer: Peer) -> None:
        """`wait` for nothing of this peer any more; what it has sent can still be read."""
        if self._sockets[peer] in self._selector.get_map():
            self._selector.unregister(self._sockets[peer])

    def detach(self, peer: Peer) -> None:
        """Forget a peer that is gone."""
        self.ignore(peer)
        self._sockets.pop(peer).close()

    def send(self, peer: Peer, message: Message) -> None:
        """Send; a peer that is gone or stuck is shut down, its end then reads as gone."""
        target = self._sockets.get(peer)
        if target is None:
            return
        try:
            target.sendall(encode(message))
        except OSError as error:
            log.warning("peer takes no messages", extra={**peer.named, "error": str(error)})
            try:
                target.shutdown(socket.SHUT_RDWR)
            except OSError:
                log.info("peer was gone already", extra=peer.named)

    def _attach(self, peer: Peer, fd: int) -> None:
        attached = socket.socket(fileno=fd)
        attached.settimeout(SEND_TIMEOUT_S)
        self._sockets[peer] = attached
        self._selector.register(attached, selectors.EVENT_READ, peer)
