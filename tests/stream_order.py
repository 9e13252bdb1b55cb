"""Streams that run nothing later than it is launched, but know what a GPU could have run at once.

Every launch is checked against all earlier ones that touch the same bytes: where one of the two writes, something (the
order of a stream, an awaited event, or the host that synchronised with one) must put them in order. So a CPU finds the
missing wait that a GPU shows once in a thousand batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

HOST = "host"
Clock = dict[str, int]
"""How far each stream, and the host, has come."""


def join(clock: Clock, other: Clock) -> None:
    for name, tick in other.items():
        clock[name] = max(clock.get(name, 0), tick)


@dataclass
class Point:
    """An event, `streams.Event`."""

    order: Order
    clock: Clock

    def synchronize(self) -> None:
        join(self.order.clocks[HOST], self.clock)


@dataclass
class Access:
    what: str
    begin: int
    end: int
    writes: bool
    stream: str
    tick: int


@dataclass
class Order:
    """In place of `streams.Streams`."""

    clocks: dict[str, Clock] = field(default_factory=lambda: {HOST: {}})
    current: str = ""
    seen: list[Access] = field(default_factory=list)
    races: list[str] = field(default_factory=list)

    def copy_in(self) -> None:
        self.current = "copy_in"

    def compute(self) -> None:
        self.current = "compute"
        join(self.clocks.setdefault("compute", {}), self.clocks.setdefault("copy_in", {}))

    def copy_out(self) -> None:
        self.current = "copy_out"

    def host(self) -> None:
        """What follows is done by the host itself."""
        self.current = HOST

    def record(self) -> Point:
        return Point(self, dict(self.clocks.setdefault(self.current, {})))

    def wait(self, point: Point) -> None:
        join(self.clocks.setdefault(self.current, {}), point.clock)

    def between(self, start: Point, end: Point) -> float:
        return 0.0

    def access(self, stream: str, what: str, tensor: torch.Tensor, writes: bool) -> None:
        """A launch on `stream`, or something that the host does, reads or writes a tensor."""
        clock = self.clocks.setdefault(stream, {})
        join(clock, self.clocks[HOST])  # nothing runs before it is launched
        clock[stream] = clock.get(stream, 0) + 1
        new = Access(what, *extent(tensor), writes, stream, clock[stream])
        for old in self.seen:
            overlap = old.begin < new.end and new.begin < old.end and (old.writes or new.writes)
            if overlap and clock.get(old.stream, 0) < old.tick:
                self.races.append(f"{what} on {stream} does not await {old.what} on {old.stream}")
        self.seen.append(new)


class Watch(TorchDispatchMode):
    """Tells `order` what each torch operation in its context reads and writes."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order
        self.kept: list[Any] = []  # no address is ever used again

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        self.kept.append(result)
        given = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)}
        given |= kwargs or {}
        fresh = [tensor for tensor in tensors_of(result) if not any(shared(tensor, other) for other in given.values())]
        for argument in op._schema.arguments:
            alias = argument.alias_info
            if alias is None or alias.is_write or fresh:  # else a view, which touches nothing
                for tensor in tensors_of(given.get(argument.name)):
                    self._tell(op, tensor, alias is not None and alias.is_write)
        for tensor in fresh:
            self._tell(op, tensor, True)
        return result

    def _tell(self, op: Any, tensor: torch.Tensor, writes: bool) -> None:
        self.order.access(self.order.current, op.__name__, tensor, writes)


def shared(tensor: torch.Tensor, given: Any) -> bool:
    """Whether a tensor is a view of what an operation was given."""
    address = tensor.untyped_storage().data_ptr()
    return any(other.untyped_storage().data_ptr() == address for other in tensors_of(given))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from the first to behind the last byte of a tensor."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize
