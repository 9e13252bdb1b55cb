"""The scheduler's turns, with sockets in the place of front-ends and engines."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from opticnerve_server import messages
from opticnerve_server.config import Config
from opticnerve_server.messages import (
    Attach,
    AttachEngine,
    Computed,
    EngineEnded,
    EngineReady,
    Granted,
    ItemRequest,
    Land,
    Message,
    PathState,
    Reserve,
    Run,
    Submit,
)
from opticnerve_server.peers import Kind, Peer
from opticnerve_server.scheduler import Scheduler
from opticnerve_server.types import Capacity, ItemPlan, PathPlan

PLAN = ItemPlan("image", 224, 224, (1, 14, 14), 2, 49, {"default": PathPlan(49, 1, 196, 64)}, ())
PATH = PathState("default", [256], 1, 0, 0.0, 4, 1, [Capacity(256, 8, 8, 1024)])
READY = EngineReady("f", "float32", "cpu", "none", [PATH], {})


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Supervisor and control, front-end 0 and engine 0 with the scheduler's ends."""
    made = [messages.socket_pair() for _ in range(3)]
    yield made
    for pair in made:
        for end in pair:
            end.close()


def heard(end: socket.socket) -> list[Message]:
    """All that has been said."""
    end.setblocking(False)
    said = []
    try:
        while True:
            said.append(messages.decode(end.recv(messages.MAX_MESSAGE_BYTES)))
    except BlockingIOError:
        return said


def test_a_free_device_starts_what_has_landed_before_anything_else_is_read(
    pairs: list[tuple[socket.socket, socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (supervisor, control), (frontend, _), (engine, _) = pairs
    scheduler = Scheduler(Config(model="any"), control)
    for message, (_, end) in zip((Attach(0), AttachEngine(0, READY)), pairs[1:], strict=True):
        socket.send_fds(supervisor, [messages.encode(message)], [end.fileno()])
    for call in range(2):
        frontend.send(messages.encode(Reserve(call, [0], [ItemRequest(49, 0, 64, 64)])))
        frontend.send(messages.encode(Submit(call, 0, PLAN, "float32")))
        scheduler._turn()
    first_land, run, second_land = heard(engine)
    assert isinstance(first_land, Land)
    assert run == Run([first_land.part.number])
    assert isinstance(second_land, Land), "it lands while the first runs"
    assert [type(message) for message in heard(frontend)] == [Granted, Granted]

    order: list[str] = []
    reserve, send = scheduler.ledger.reserve, scheduler.batcher.engines[0].send
    monkeypatch.setattr(scheduler.ledger, "reserve", lambda *said: (order.append("reserve"), reserve(*said))[1])
    scheduler.batcher.engines[0].send = lambda message: (order.append("run"), send(message))[1]
    engine.send(messages.encode(Computed()))
    for call in range(2, 30):
        frontend.send(messages.encode(Reserve(call, [0], [ItemRequest(49, 0, 64, 64)])))
    scheduler._turn()
    assert heard(engine) == [Run([second_land.part.number])]
    assert order.count("reserve") == 28
    for peer in (Peer(Kind.FRONTEND, 0), Peer(Kind.ENGINE, 0)):
        scheduler._peers.detach(peer)
    assert order.index("run") <= 1, "the device would wait while calls are let in"


def test_an_engine_that_is_gone_is_given_nothing_while_others_work() -> None:
    pairs = [messages.socket_pair() for _ in range(4)]
    (supervisor, control), (frontend, _), _, (other, _) = pairs
    scheduler = Scheduler(Config(model="any"), control)
    for message, (_, end) in zip((Attach(0), AttachEngine(0, READY), AttachEngine(1, READY)), pairs[1:], strict=True):
        socket.send_fds(supervisor, [messages.encode(message)], [end.fileno()])
    scheduler._turn()
    for end in pairs[2]:
        end.close()
    frontend.send(messages.encode(Reserve(0, [0], [ItemRequest(49, 0, 64, 64)])))
    frontend.send(messages.encode(Submit(0, 0, PLAN, "float32")))
    scheduler._turn()
    assert [type(message) for message in heard(other)] == [Land, Run]
    for peer in (Peer(Kind.FRONTEND, 0), Peer(Kind.ENGINE, 0), Peer(Kind.ENGINE, 1)):
        scheduler._peers.detach(peer)
    for end in (supervisor, control, *pairs[1], *pairs[3]):
        end.close()


def test_an_engine_whose_end_is_reported_before_it_is_seen(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    supervisor, control = pairs[0]
    scheduler = Scheduler(Config(model="any"), control)
    for message, (_, end) in zip((Attach(0), AttachEngine(0, READY)), pairs[1:], strict=True):
        socket.send_fds(supervisor, [messages.encode(message)], [end.fileno()])
    scheduler._turn()
    supervisor.send(messages.encode(EngineEnded(0)))
    for end in pairs[2]:
        end.close()
    assert {peer.kind for peer in scheduler._peers.wait(0)} == {Kind.SUPERVISOR, Kind.ENGINE}, "both in one turn"
    scheduler._turn()
    assert not scheduler.batcher.engines
    scheduler._peers.detach(Peer(Kind.FRONTEND, 0))
