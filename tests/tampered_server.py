"""The server, with a device that does as the file says that the environment variable TAMPER names.

Takes the arguments of the program itself. A silent front-end is replaced after TAMPER_SILENCE_S seconds. The file of
TAMPER may come and go, its content is a JSON object:

    "fail": true    every forward raises
    "most": N       a forward of more than N units finds no memory
    "seconds": S    a forward sleeps so long and returns what its capacity has returned before: a device of fixed speed
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from opticnerve_server import cli, lifecycle
from opticnerve_server.config import Config
from opticnerve_server.processes import prepare

if TYPE_CHECKING:
    import torch

    from opticnerve_server.loading import Loaded
    from opticnerve_server.types import Capacity


def tampered_engine(config: Config, control: socket.socket, arena_fd: int) -> None:
    """The life of the engine process."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the engine itself does
    prepare("engine")
    from opticnerve_server import engine

    os.nice = lambda _: 0  # as with a GPU, which computes beside the processor's work
    load = engine.load
    engine.load = lambda config: _tamper(load(config))
    engine.main(config, control, arena_fd)


def _tamper(loaded: Loaded) -> Loaded:
    import torch

    tower = loaded.tower.tower
    original = tower.forward
    file = Path(os.environ.get("TAMPER", "/nowhere"))
    returned: dict[tuple[str, Capacity], torch.Tensor] = {}

    def forward(path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        wanted = json.loads(file.read_text()) if file.exists() else {}
        if wanted.get("fail"):
            raise RuntimeError("as the test wants it")
        if capacity.units > wanted.get("most", capacity.units):
            raise torch.OutOfMemoryError("as the test wants it")
        if "seconds" in wanted:
            time.sleep(wanted["seconds"])
            return returned[path, capacity]
        output = original(path, buffers, capacity)
        returned[path, capacity] = output.clone()
        return output

    tower.forward = forward  # type: ignore[method-assign]
    return loaded


if __name__ == "__main__":
    lifecycle.FRONTEND_SILENCE_S = float(os.environ.get("TAMPER_SILENCE_S", lifecycle.FRONTEND_SILENCE_S))
    lifecycle.Supervisor = functools.partial(lifecycle.Supervisor, engine_target=tampered_engine)  # type: ignore[misc,assignment]
    sys.exit(cli.main())
