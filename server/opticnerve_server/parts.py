"""Parts as an engine knows them: what lands on its device, and what of it runs together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from .messages import Land, Run, Work
from .types import ItemPlan, Load


class Failure(NamedTuple):
    """Why an item has no rows: a reason of the table in `errors.py`, a sentence, when a retry makes sense."""

    reason: str
    message: str
    retry_after: float | None = None


@dataclass(slots=True)
class Part:
    """A part of an item on its way through the device; almost always the whole item."""

    work: Work
    landed_at: int = 0  # where its pixels begin in the landing block
    failure: Failure | None = None  # it could not land

    @property
    def plan(self) -> ItemPlan:
        return self.work.plan


@dataclass(slots=True)
class Batch:
    """Parts that go to the device together, in the order in which their pixels landed."""

    parts: list[Part] = field(default_factory=list)

    @property
    def plans(self) -> list[ItemPlan]:
        return [part.plan for part in self.parts]

    def load(self, path: str) -> Load:
        """What the batch asks of one path."""
        return Load.of(plan.paths[path] for plan in self.plans)


class Intake:
    """What has landed and not started. Device thread only."""

    def __init__(
        self, land: Callable[[Part], int], run: Callable[[Batch], None], fail: Callable[[Part, Failure], None]
    ) -> None:
        """`land` starts the copy of a part's pixels and says where they begin, `run` launches, `fail` ends a part."""
        self._land, self._run, self._fail = land, run, fail
        self._landed: dict[int, Part] = {}

    def handle(self, message: Land | Run) -> None:
        """Do what the scheduler says. A part that has failed already, or is not named by the Run, does not run."""
        match message:
            case Land(part=work):
                part = Part(work)
                part.landed_at = self._land(part)
                if part.failure is None:
                    self._landed[work.number] = part
                else:
                    self._fail(part, part.failure)
            case Run(numbers=numbers):
                landed, self._landed = self._landed, {}
                self._run(Batch([landed[number] for number in numbers if number in landed]))
