"""The engine's sockets: to the supervisor, and to every front-end that the supervisor hands over."""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Sequence

from .messages import MAX_MESSAGE_BYTES, Attach, Message, decode, encode

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 5.0
"""A front-end that does not take a small message for this long is treated as dead."""


class Peers:
    """The sockets to the supervisor and to every front-end. Sends may come from any thread, reads from the receiver."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._frontends: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, None)

    def wait(self, timeout: float) -> Sequence[int | None]:
        """Who has something to read: front-end indices, None for the supervisor."""
        return [key.data for key, _ in self._selector.select(timeout)]

    def read(self, frontend: int | None) -> Message | None:
        """The next message, None if the peer is gone. A new front-end that the supervisor hands over is attached."""
        if frontend is not None:
            try:
                data = self._frontends[frontend].recv(MAX_MESSAGE_BYTES)
            except OSError:
                data = b""
            return decode(data) if data else None
        data, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 1)
        if not data:
            return None
        message = decode(data)
        if isinstance(message, Attach):
            peer = socket.socket(fileno=fds[0])
            peer.settimeout(SEND_TIMEOUT_S)
            self._frontends[message.frontend] = peer
            self._selector.register(peer, selectors.EVENT_READ, message.frontend)
        return message

    def detach(self, frontend: int) -> None:
        """Forget a front-end that is gone."""
        peer = self._frontends.pop(frontend)
        self._selector.unregister(peer)
        peer.close()

    def tell_supervisor(self, message: Message) -> None:
        self._control.sendall(encode(message))

    def tell_frontend(self, frontend: int, message: Message) -> None:
        """Send; one that is gone or stuck is shut down, its end then reads as gone."""
        peer = self._frontends.get(frontend)
        if peer is None:
            return
        try:
            peer.sendall(encode(message))
        except OSError as error:
            log.warning("front-end takes no messages", extra={"frontend": frontend, "error": str(error)})
            try:
                peer.shutdown(socket.SHUT_RDWR)
            except OSError:
                log.info("front-end was gone already", extra={"frontend": frontend})
