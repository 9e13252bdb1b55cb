"""A child that the server does not depend on: its end costs its own callers, and nobody else."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from .messages import Stop
from .processes import Child

PAUSE_S = 2.0
"""Between the end of one that died and the start of its heir: one that cannot live takes no more of the machine."""

_log = logging.getLogger(__name__)


class Companion:
    """Runs from construction until `close`, with `target(*arguments)` as its life. For the supervisor's thread."""

    def __init__(self, name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._name, self._target, self._arguments = name, target, arguments
        self._again = float("inf")  # when the next one is due
        self._stopping = False
        self._start()

    def look_after(self) -> None:
        """Note its death, and start the next one after a pause. Called every second or so."""
        if self._again == float("inf") and self._child.wait(0) and not self._stopping:
            code = self._child.process.exitcode
            _log.error("companion died, its calls are lost", extra={"child": self._name, "exit_code": code})
            self._again = time.monotonic() + PAUSE_S
        if time.monotonic() >= self._again:
            self._child.close()
            self._start()

    def stop(self, grace: float) -> None:
        """Tell it to finish its calls within `grace` seconds, and to end."""
        self._stopping, self._again = True, float("inf")
        self._child.send(Stop(grace))

    def wait(self, until: float) -> None:
        """For its end, until a moment of time.monotonic()."""
        if not self._child.wait(max(0.0, until - time.monotonic())):
            _log.warning("companion did not end in time, its calls are lost", extra={"child": self._name})

    def close(self) -> None:
        """End it at once."""
        self._child.kill()
        self._child.close()

    def _start(self) -> None:
        self._again = float("inf")
        self._child = Child(self._name, self._target, self._arguments)
