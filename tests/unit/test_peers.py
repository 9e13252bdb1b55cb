"""The scheduler's sockets: whom the supervisor hands over, and who takes no messages any more."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator

import pytest

from opticnerve_server import messages, peers
from opticnerve_server.messages import Attach, Computed, LeasesEnded
from opticnerve_server.peers import SUPERVISOR, Kind, Peer, Peers

FRONTEND = Peer(Kind.FRONTEND, 7)


Pair = tuple[Peers, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The scheduler's sockets, and the other end of that of a front-end."""
    supervisor, control = messages.socket_pair()
    theirs, ours = messages.socket_pair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with supervisor, control, theirs:
        connected = Peers(control)
        with ours:
            socket.send_fds(supervisor, [messages.encode(Attach(7))], [ours.fileno()])
        assert connected.read(SUPERVISOR) == Attach(7)
        yield connected, theirs
        connected.detach(FRONTEND)


def test_one_that_takes_no_messages_is_shut_down(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers, "SEND_TIMEOUT_S", 0.01)
    connected, theirs = pair
    theirs.send(messages.encode(Computed()))
    assert [connected.read(peer) for peer in connected.wait(1.0)] == [Computed()]
    while not caplog.records:
        connected.send(FRONTEND, LeasesEnded(0, 0))
    (record,) = caplog.records
    assert (record.levelno, record.message) == (logging.WARNING, "peer takes no messages")
    assert (record.peer, record.number) == ("front-end", 7)  # type: ignore[attr-defined]
    assert connected.wait(1.0) == [FRONTEND]
    assert connected.read(FRONTEND) is None
    connected.send(Peer(Kind.FRONTEND, 8), LeasesEnded(0, 0))  # to nobody


def test_one_that_is_slow_holds_up_nobody_and_hears_all_in_order(pair: Pair) -> None:
    connected, theirs = pair
    began, heard = time.monotonic(), []
    for call in range(1000):  # many times what the socket holds
        connected.send(FRONTEND, LeasesEnded(call, 0))
    assert time.monotonic() - began < peers.SEND_TIMEOUT_S / 2
    theirs.setblocking(False)
    while len(heard) < 1000:
        try:
            heard.append(messages.decode(theirs.recv(messages.MAX_MESSAGE_BYTES)))
        except BlockingIOError:
            assert connected.wait(1.0) == [], "it has said nothing"
    assert heard == [LeasesEnded(call, 0) for call in range(1000)]
    began = time.monotonic()
    assert connected.wait(0.05) == []
    assert time.monotonic() - began > 0.04, "there is nothing left to send"
