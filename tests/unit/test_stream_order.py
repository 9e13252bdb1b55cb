"""Three batches in flight, as far as the device thread may run ahead of the device: no two launches race."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from house import House
from opticnerve_server import buffers
from opticnerve_server.dispatcher import _Launched
from stream_order import HOST, Order, Watch


@contextmanager
def host_writes(order: Order, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Staging is written by the host as soon as it is taken."""
    take = buffers.Staging.take

    def told(staging: buffers.Staging, size: int) -> torch.Tensor:
        taken = take(staging, size)
        order.access(HOST, "fill", taken, writes=True)
        return taken

    with monkeypatch.context() as patch, Watch(order):
        patch.setattr(buffers.Staging, "take", told)
        yield


def run_ahead(house: House, order: Order, sizes: list[list[tuple[int, int]]], *, full: bool) -> None:
    """Each batch starts as soon as the one before is computed, or launched if all are `full`, and the half of the one
    before that is copied out.
    """
    flying: list[_Launched] = []
    for batch in sizes:
        for size in batch:
            house.submit(*size)
        house.fill()  # lands while the batch before is not computed
        if flying and not full:
            flying[-1].computed.synchronize()
        if len(flying) > 1:
            report(house, order, flying.pop(0))
        house.dispatcher.run(house.take())
        flying.append(house.dispatcher._launched.get())
    for launched in flying:
        report(house, order, launched)


def report(house: House, order: Order, launched: _Launched) -> None:
    """What the finisher does with a batch; the house overwrites its pixels and, when it has read them, its rows."""
    launched.copied.synchronize()
    order.host()
    order.access(HOST, "judge", launched.peaks, writes=False)
    house._finished(house.dispatcher._judge(launched, 0.0))
    house.dispatcher._ring_free[launched.turn].release()


BATCHES = [
    [(8, 16)],  # both paths
    [(8, 8), (8, 8), (8, 16), (4, 4)],
    [(40, 32)],  # over every graph: eager
    [(4, 64), (16, 8)],
    [(4, 4)],
    [(32, 32)],
    [(8, 16), (12, 12)],
]


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("use_graphs", [True, False])
def test_no_two_launches_race(use_graphs: bool, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(use_graphs=use_graphs)
    order = house.dispatcher._streams = Order()
    with host_writes(order, monkeypatch):
        run_ahead(house, order, BATCHES, full=full)
    assert {access.stream for access in order.seen} == {HOST, "copy_in", "compute", "copy_out"}
    assert order.races == []
    for call in range(house.calls):
        house.check(call)
