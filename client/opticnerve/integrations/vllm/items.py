"""The words of the scheduler's side: requests, items, loads."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from opticnerve.integrations.vllm.reference import Reference
from opticnerve.tensors import DtypeName

ITEMSIZE: dict[DtypeName, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a number."""


class Load(NamedTuple):
    """What a rank needs to take over `rows` x `width` numbers. Plain, for it is sent to processes."""

    offset: int
    rows: int
    width: int
    dtype: DtypeName

    @property
    def nbytes(self) -> int:
        return self.rows * self.width * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Source:
    """What to fetch, where, and how much."""

    reference: Reference
    address: str
    rows: int
    nbytes: int


@dataclass(slots=True)
class Item:
    """Rows of one uuid: on their way, there, or failed, as its future is."""

    source: Source
    offset: Future[int]
    users: set[str]  # requests that have not passed the item
    loading: int = 0  # steps whose ranks have not confirmed that they took it over

    @property
    def rows(self) -> int:
        return self.source.rows

    @property
    def error(self) -> BaseException | None:
        return self.offset.exception() if self.offset.done() else None

    @property
    def ready(self) -> bool:
        return self.offset.done() and self.offset.exception() is None

    @property
    def idle(self) -> bool:
        """Whether nobody needs it, and nobody is writing it."""
        return not self.users and not self.loading and self.offset.done()


@dataclass(slots=True)
class Asked:
    """One request from its first pass to its end."""

    waits_since: float | None = None
    uses: set[str] = field(default_factory=set)  # uuids of items whose user it is
    local: set[str] = field(default_factory=set)  # uuids that vLLM encodes itself
    failed: bool = False
