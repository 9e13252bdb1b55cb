"""A server whose devices are fakes without torch: supervisor, scheduler and front-ends are real.

Takes the arguments of the program itself. FAKE_WIDTH is the width of a row, FAKE_SECONDS what a batch takes, FAKE_LOG
a file to which each engine appends "device part" when it answers one.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import time

import numpy as np

from opticnerve_server import cli, lifecycle, messages
from opticnerve_server.config import Config
from opticnerve_server.messages import Computed, Done, EngineReady, EngineWorks, PartDone, PathState
from opticnerve_server.parts import Batch, Failure, Intake, Part
from opticnerve_server.processes import prepare
from opticnerve_server.slots import Arena
from opticnerve_server.types import Capacity, Dispatched, Outcome

BATCH = Capacity(units=256, items=8, segments=8, longest=1024)


class FakeDevice:
    """Rows are those of `rows_of`: they depend on every pixel, and not on the device."""

    def __init__(self, config: Config, device: int, control: socket.socket, link: socket.socket, arena_fd: int) -> None:
        self.slots = Arena(arena_fd, config.arena_bytes).bytes
        self.device, self.control, self.link = device, control, link
        self.width, self.seconds = int(os.environ["FAKE_WIDTH"]), float(os.environ["FAKE_SECONDS"])
        self.log = open(os.environ["FAKE_LOG"], "a", buffering=1)  # noqa: SIM115 - for life

    def live(self) -> None:
        path = PathState("default", [BATCH.units], 1, 0, 0.0, 4, 1, [BATCH])
        self.control.send(
            messages.encode(EngineReady("fake", "float32", "cpu", "none", [path], {}, "tiny", "qwen3_vl"))
        )
        intake = Intake(lambda part: 0, self.run, self.fail)
        self.link.settimeout(0.2)
        while True:
            try:
                data = self.link.recv(messages.MAX_MESSAGE_BYTES)
            except TimeoutError:
                self.control.send(messages.encode(EngineWorks(True)))
                continue
            if not data:
                return
            message = messages.decode(data)
            assert isinstance(message, messages.Land | messages.Run)
            intake.handle(message)

    def run(self, batch: Batch) -> None:
        from fake_engine import rows_of  # imports the metrics, which the supervisor must set up first

        began, load = time.monotonic(), batch.load("default")
        time.sleep(self.seconds)
        done = []
        for part in batch.parts:
            work = part.work
            pixels = self.slots[work.pixels : work.pixels + work.plan.pixel_bytes]
            rows = rows_of(pixels, work.plan.tokens, self.width, work.dtype)
            at = work.rows + work.first_row * rows.itemsize * self.width
            self.slots[at : at + rows.nbytes] = rows.reshape(-1).view(np.uint8)
            run = Dispatched("default", Outcome.HIT, BATCH.units, work.plan.tokens, load.items, load.units, self.device)
            done.append(PartDone(work.number, [run]))
            print(self.device, work.number, file=self.log)
        self.link.send(messages.encode(Computed()))
        self.link.send(messages.encode(Done(done, began, time.monotonic() - began, 0.0)))

    def fail(self, part: Part, failure: Failure) -> None:
        raise RuntimeError("nothing fails to land")


def fake_engine(config: Config, device: int, control: socket.socket, link: socket.socket, arena_fd: int) -> None:
    """The life of an engine process."""
    prepare(f"engine-{device}")
    FakeDevice(config, device, control, link, arena_fd).live()


if __name__ == "__main__":
    lifecycle.Supervisor = functools.partial(lifecycle.Supervisor, engine_target=fake_engine)  # type: ignore[misc,assignment]
    sys.exit(cli.main())
