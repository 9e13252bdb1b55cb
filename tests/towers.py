"""Runs a tower as the engine does: its buffers poisoned, padded, filled, run, gathered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opticnerve_server.models import registry
from opticnerve_server.models.base import PIXELS
from opticnerve_server.types import Capacity, Load
from oracles import Media

PATH = "default"

TOLERANCES = {"float32": {"whole": 1e-5, "row": 1e-4}, "bfloat16": {"whole": 2e-2, "row": 6e-2}}
"""By the tower's dtype: largest norm ratio of a difference, of all rows together and of a single one."""


def load_tower(directory: Path, dtype: str = "float32", device: str = "cpu", *, projector: bool = True) -> Any:
    source = registry.open_model(str(directory), "safetensors", projector=projector)
    return registry.build_tower(
        source,
        registry.build_planner(source),
        load_format="safetensors",
        device=device,
        dtype=dtype,
        attention_backend="auto",
        kernels="auto",
    ).tower


def exact_capacity(batch: Sequence[Media]) -> Capacity:
    load = Load.of(media.plan.paths[PATH] for media in batch)
    return Capacity(load.units, load.items, load.segments, load.longest)


def poison(tower: Any, capacity: Capacity, path: str = PATH) -> dict[str, np.ndarray[Any, Any]]:
    """Buffers of a capacity as `fill` finds them: pad values, and pixels full of what must not matter."""
    return {
        name: np.full(spec.shape, 255 if name == PIXELS else spec.pad, spec.dtype)
        for name, spec in tower.buffers(path, capacity).items()
    }


@torch.inference_mode()
def run_tower(tower: Any, batch: Sequence[Media], capacity: Capacity | None = None) -> torch.Tensor:
    """Rows [tokens, width] of a batch, on the CPU; by default in buffers of exactly its size."""
    plans = [media.plan for media in batch]
    outputs = {path: _run_path(tower, path, batch, capacity) for path in tower.planner.paths}
    index = tower.gather_index(plans, {path: len(lines) for path, lines in outputs.items()})
    constant = [] if tower.constant_rows is None else [tower.constant_rows]
    return torch.cat([*(lines for lines in outputs.values() if len(lines)), *constant]).cpu()[torch.from_numpy(index)]


def _run_path(tower: Any, path: str, batch: Sequence[Media], capacity: Capacity | None) -> torch.Tensor:
    """The lines of one path; none where the batch has nothing on it."""
    load = Load.of(media.plan.paths[path] for media in batch)
    if not load.units:
        return torch.empty(0)
    capacity = capacity or Capacity(load.units, load.items, load.segments, load.longest)
    arrays = poison(tower, capacity, path)
    tower.fill(path, [media.plan for media in batch], {k: array for k, array in arrays.items() if k != PIXELS})
    used = np.concatenate([_pixels(media, path) for media in batch])
    arrays[PIXELS][: used.size] = used
    buffers = {name: torch.from_numpy(array).to(tower.device) for name, array in arrays.items()}
    lines: torch.Tensor = tower.forward(path, buffers, capacity)
    return lines


def _pixels(media: Media, path: str) -> np.ndarray[Any, Any]:
    """The bytes of a path: those of the paths lie one behind another."""
    paths = media.plan.paths
    begin = sum(paths[name].pixel_bytes for name in list(paths)[: list(paths).index(path)])
    return media.frames.ravel()[begin : begin + paths[path].pixel_bytes]


def assert_items_independent(tower: Any, batch: Sequence[Media]) -> None:
    """The rows of an item alone are those it has in any company, in this order and in the opposite one."""
    alone = [run_tower(tower, [media]) for media in batch]
    for order in (range(len(batch)), range(len(batch) - 1, -1, -1)):
        mixed = run_tower(tower, [batch[i] for i in order]).split([batch[i].plan.tokens for i in order])
        for i, rows in zip(order, mixed, strict=True):
            assert_close(rows, alone[i], tower)


def assert_padding_harmless(tower: Any, batch: Sequence[Media], expected: torch.Tensor) -> None:
    """A batch gives its rows in larger buffers too."""
    exact = exact_capacity(batch)
    for units, segments in ((1, 0), (40, 1), (333, 30)):
        capacity = Capacity(exact.units + units, exact.items + 3, exact.segments + segments, exact.longest + 64)
        assert_close(run_tower(tower, batch, capacity), expected, tower)


def assert_close(found: torch.Tensor, expected: torch.Tensor, tower: Any, slack: float = 1) -> None:
    """Each level of the rows by itself, within `slack` times the tolerances of the tower's dtype."""
    assert found.dtype == tower.dtype
    assert found.shape == expected.shape
    assert found.shape[1] == tower.planner.layout.width
    tolerance = TOLERANCES[str(tower.dtype).removeprefix("torch.")]
    levels = [rows.double().split(tower.planner.layout.hidden, dim=1) for rows in (found, expected)]
    for number, (level, reference) in enumerate(zip(*levels, strict=True)):
        difference = level - reference
        assert difference.isfinite().all()
        whole = float(difference.norm() / reference.norm())
        row = float((difference.norm(dim=1) / reference.norm(dim=1)).max())
        name = f"{tower.planner.architecture} {tower.dtype} level {number}"
        print(f"{name}: relative error {whole:.1e}, of a row {row:.1e}")
        assert whole <= slack * tolerance["whole"]
        assert row <= slack * tolerance["row"]
