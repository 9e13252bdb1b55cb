"""A two-path tower small enough to compute by hand, for tests of graphs, batcher, dispatcher and self-test.

An image of h x w pixels (multiples of 4) has h*w/16 tokens on path "main": one unit a 4x4 block, two rows a unit, one
segment an image, or `bands` segments. A wide image has two more units on path "side". Rows of an item: its main lines,
its side lines, then one constant row. A main line is [sum of its 48 bytes, mean over its segment]; a side line is [sum
of all bytes of the item, 1]. `expected` says the same with numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from opticnerve_server.models.base import PIXELS, BufferSpec, ImageItem, PathSpec, PlanError
from opticnerve_server.types import Capacity, ItemPlan, Layout, PathPlan, Span

BLOCK_BYTES = 48


class FakePlanner:
    architecture = "fake"
    layout = Layout(hidden=2, deepstack_levels=0)

    def __init__(self, bands: int = 1) -> None:
        self.bands = bands
        self.paths = {
            "main": PathSpec(min_units=4, max_units=256, rows_per_unit=2),
            "side": PathSpec(min_units=2, max_units=16, rows_per_unit=1, fixed_units=True),
        }

    def plan(self, item: ImageItem) -> ItemPlan:
        if item.height % 4 or item.width % 4 or item.height * item.width == 0:
            raise PlanError(f"{item.height} x {item.width} is no multiple of 4")
        units = item.height * item.width // 16
        side = 2 if item.width > item.height else 0
        nbytes = units * BLOCK_BYTES
        return ItemPlan(
            kind="image",
            height=item.height,
            width=item.width,
            grid=(1, item.height // 4, item.width // 4),
            merge=1,
            tokens=units + side + 1,
            paths={
                "main": PathPlan(units, min(self.bands, units), -(-units // min(self.bands, units)) * 2, nbytes),
                "side": PathPlan(side, bool(side), bool(side), 4 * bool(side)),
            },
            spans=(Span("image", units + side + 1),),
        )

    def split(self, plan: ItemPlan, holds: Callable[[ItemPlan], bool]) -> list[ItemPlan]:
        return [plan]

    def fill_pixels(self, media: npt.NDArray[np.uint8], plan: ItemPlan, out: npt.NDArray[np.uint8]) -> None:
        main = plan.paths["main"].pixel_bytes
        out[:main] = media.reshape(-1)
        if plan.paths["side"].units:
            out[main:] = np.frombuffer(np.array(int(media.sum()), dtype="<u4").tobytes(), np.uint8)


class FakeTower:
    def __init__(self, bands: int = 1) -> None:
        self.planner = FakePlanner(bands)
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.constant_rows = torch.tensor([[-1.0, -2.0]])
        self.forwards: list[tuple[str, Capacity]] = []

    def buffers(self, path: str, capacity: Capacity) -> dict[str, BufferSpec]:
        if path == "side":
            return {
                "item": BufferSpec((capacity.units,), "int32"),
                PIXELS: BufferSpec((4 * capacity.units,), "uint8"),
            }
        return {
            "cu": BufferSpec((capacity.segments + 1,), "int32"),
            "scale": BufferSpec((2 * capacity.units,), "float32"),
            PIXELS: BufferSpec((BLOCK_BYTES * capacity.units,), "uint8"),
        }

    def fill(self, path: str, parts: Sequence[ItemPlan], out: Mapping[str, npt.NDArray[np.generic]]) -> None:
        used = [part.paths[path] for part in parts if part.paths[path].units]
        if path == "side":
            out["item"][: 2 * len(used)] = np.repeat(np.arange(len(used)), 2)
            return
        lengths: list[int] = []
        for plan in used:
            each = plan.longest // 2
            lengths += [min(each, plan.units - start) * 2 for start in range(0, plan.units, each)]
        ends = np.cumsum([0, *lengths])
        out["cu"][: len(ends)] = ends
        out["cu"][len(ends) :] = ends[-1]
        out["scale"][: ends[-1]] = 1.0

    def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        self.forwards.append((path, capacity))
        if path == "side":
            sums = buffers[PIXELS].view(torch.int32)[buffers["item"].long()].float()
            return torch.stack([sums, torch.ones_like(sums)], dim=1)
        rows = buffers[PIXELS].view(2 * capacity.units, -1).float().sum(1) * buffers["scale"]
        segment = torch.searchsorted(buffers["cu"], torch.arange(len(rows), dtype=torch.int32), right=True)
        totals = torch.zeros(capacity.segments + 2).index_add_(0, segment, rows)
        counts = torch.zeros(capacity.segments + 2).index_add_(0, segment, torch.ones_like(rows))
        mean = (totals / counts)[segment].view(-1, 2)[:, 0]
        return torch.stack([rows.view(-1, 2).sum(1), mean], dim=1)

    def gather_index(self, parts: Sequence[ItemPlan], lines: Mapping[str, int]) -> npt.NDArray[np.int32]:
        index: list[int] = []
        main, side, constant = 0, lines["main"], lines["main"] + lines["side"]
        for part in parts:
            units, extra = part.paths["main"].units, part.paths["side"].units
            index += [*range(main, main + units), *range(side, side + extra), constant]
            main, side = main + units, side + extra
        return np.array(index, dtype=np.int32)


def expected(media: npt.NDArray[np.uint8], plan: ItemPlan) -> npt.NDArray[np.float64]:
    """The rows of one image, by numpy in float64."""
    rows = media.reshape(-1, BLOCK_BYTES // 2).astype(np.float64).sum(1)
    main = plan.paths["main"]
    means = np.concatenate(
        [np.full(len(part), part.mean()) for part in np.split(rows, range(main.longest, len(rows), main.longest))]
    )
    lines = [[rows[2 * i] + rows[2 * i + 1], means[2 * i]] for i in range(main.units)]
    lines += [[float(media.astype(np.int64).sum()), 1.0]] * plan.paths["side"].units
    return np.array([*lines, [-1.0, -2.0]])
