"""How far a bench is."""

from __future__ import annotations

import sys


class Progress:
    """One line of standard error, if that is a terminal."""

    WIDTH = 30

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0

    def step(self, what: str) -> None:
        """`what` begins; a step more is done with the next call."""
        bar = ("#" * (self._done * self.WIDTH // self._total)).ljust(self.WIDTH, ".")
        self._say(f"[{bar}] {self._done} of {self._total}: {what}")
        self._done += 1

    def end(self) -> None:
        """Take the line away."""
        self._say("")

    @staticmethod
    def _say(line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
