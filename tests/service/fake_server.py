"""A server whose children are fakes: the supervisor, its ports and its processes are real.

Run as a program with the configuration as JSON; tests signal it and its children. The environment variable FAKE_ENGINE
says how the engine behaves: "serve"; "slow": stays in CAPTURING until the file FAKE_GATE exists; "mute": sends nothing
while that file exists; "exit:CODE" at once. FAKE_FRONTEND "slow": front-ends are not ready until that file exists;
"stuck": the first says nothing any more once it does.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from opticnerve_server import lifecycle, messages, telemetry
from opticnerve_server.config import Config
from opticnerve_server.credentials import Credentials
from opticnerve_server.messages import (
    Attach,
    EngineReady,
    FrontendAlive,
    FrontendReady,
    Occupancy,
    PathState,
    PhaseChange,
    Stop,
)
from opticnerve_server.processes import prepare
from opticnerve_server.types import Layout, Phase

READY = EngineReady(
    fingerprint="f" * 64,
    dtype="float32",
    device="cpu",
    attention_backend="sdpa",
    paths=[PathState("default", [64], 1, 0, 0.0)],
    reasons={"dtype": "a fake's"},
    model="tiny",
    architecture="fake",
    layout=Layout(hidden=8, deepstack_levels=1),
)


def fake_engine(config: Config, control: socket.socket, arena_fd: int) -> None:
    prepare("engine")
    behaviour = os.environ.get("FAKE_ENGINE", "serve")
    if behaviour.startswith("exit:"):
        sys.exit(int(behaviour.removeprefix("exit:")))
    assert os.fstat(arena_fd).st_size == config.arena_bytes
    control.send(messages.encode(PhaseChange(Phase.CAPTURING, "0 of 1 graphs")))
    while behaviour == "slow" and not Path(os.environ["FAKE_GATE"]).exists():
        time.sleep(0.02)
    control.send(messages.encode(READY))
    control.settimeout(0.1)
    peers: list[socket.socket] = []
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(control, messages.MAX_MESSAGE_BYTES, 1)
        except TimeoutError:
            if behaviour == "mute" and Path(os.environ["FAKE_GATE"]).exists():
                continue
            control.send(messages.encode(Occupancy(len(peers), 2, 3)))
            continue
        message = messages.decode(data) if data else None
        if message is None or isinstance(message, Stop):
            return
        if isinstance(message, Attach):
            peers.append(socket.socket(fileno=fds[0]))
            peers[-1].send(messages.encode(PhaseChange(Phase.READY, "hello from the engine")))


def fake_frontend(
    config: Config,
    index: int,
    control: socket.socket,
    engine: socket.socket,
    arena_fd: int,
    address: str,
    instance_id: str,
    good: Credentials,
) -> None:
    """Accepts connections; appends what it is told, a line a message, to FAKE_LOG."""
    prepare(f"frontend-{index}")
    host, _, port = address.rpartition(":")
    with socket.socket() as listener, Path(os.environ["FAKE_LOG"]).open("a") as told:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, int(port)))
        listener.listen()
        while os.environ.get("FAKE_FRONTEND") == "slow" and not Path(os.environ["FAKE_GATE"]).exists():
            time.sleep(0.02)
        control.send(messages.encode(FrontendReady()))
        hello = messages.decode(engine.recv(messages.MAX_MESSAGE_BYTES))
        tenants = sorted((good.tokens or {}).values())
        print(index, os.getpid(), "from engine", hello, tenants, file=told, flush=True)
        stuck = os.environ.get("FAKE_FRONTEND") == "stuck" and index == 0
        while data := control.recv(messages.MAX_MESSAGE_BYTES):  # an Occupancy every 0.1 s, if nothing else
            if not (stuck and Path(os.environ["FAKE_GATE"]).exists()):
                control.send(messages.encode(FrontendAlive()))
            message = messages.decode(data)
            if not isinstance(message, Occupancy):
                print(index, os.getpid(), message, file=told, flush=True)
            if isinstance(message, Stop):
                time.sleep(float(os.environ.get("FAKE_WORK_S", "0")))
                return


if __name__ == "__main__":
    telemetry.set_up("supervisor")
    lifecycle.SILENCE_S = float(os.environ.get("FAKE_SILENCE_S", lifecycle.SILENCE_S))
    lifecycle.FRONTEND_SILENCE_S = float(os.environ.get("FAKE_FRONTEND_SILENCE_S", lifecycle.FRONTEND_SILENCE_S))
    supervisor = lifecycle.Supervisor(
        Config(**json.loads(sys.argv[1])),
        {"animation": "first frame"},
        engine_target=fake_engine,
        frontend_target=fake_frontend,
    )
    code = supervisor.run()
    assert "torch" not in sys.modules, "the supervisor imported torch"
    sys.exit(code)
