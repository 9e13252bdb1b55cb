"""The scheduler's sockets: whom the supervisor hands over, and who takes no messages any more."""

from __future__ import annotations

import logging
import socket

import pytest

from opticnerve_server import messages, peers
from opticnerve_server.messages import Attach, Computed, LeasesEnded
from opticnerve_server.peers import SUPERVISOR, Kind, Peer, Peers

FRONTEND = Peer(Kind.FRONTEND, 7)


def test_one_that_takes_no_messages_is_shut_down(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers, "SEND_TIMEOUT_S", 0.01)
    supervisor, control = messages.socket_pair()
    theirs, ours = messages.socket_pair()
    with supervisor, control, theirs:
        connected = Peers(control)
        with ours:
            socket.send_fds(supervisor, [messages.encode(Attach(7))], [ours.fileno()])
        assert connected.read(SUPERVISOR) == Attach(7)
        theirs.send(messages.encode(Computed()))
        assert [connected.read(peer) for peer in connected.wait(1.0)] == [Computed()]
        for call in range(1 << 16):  # over any buffer
            connected.send(FRONTEND, LeasesEnded(call, 0))
            if caplog.records:
                break
        (record,) = caplog.records
        assert (record.levelno, record.message) == (logging.WARNING, "peer takes no messages")
        assert (record.peer, record.number) == ("front-end", 7)  # type: ignore[attr-defined]
        assert connected.wait(1.0) == [FRONTEND]
        assert connected.read(FRONTEND) is None
        connected.detach(FRONTEND)
        connected.send(FRONTEND, LeasesEnded(0, 0))  # to nobody
        assert connected.wait(0) == []
