"""`opticnerve-server check`: what `serve` would load and lay out, validated without serving."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .buffers import Packing
from .config import Config
from .loading import load
from .models.base import BufferSpec, Tower
from .types import Capacity


@dataclass(frozen=True, slots=True)
class PathReport:
    """One path: its budgets, and the static buffers of its largest capacity by name, in bytes."""

    path: str
    budgets: list[int]
    graphs: int
    max_items: int
    max_segments: int
    longest: int
    buffers: dict[str, dict[str, Any]]
    buffer_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """All that `check` has to say.

    `arena_bytes` is what the buffers of all paths and budgets share; `graph_memory_bytes` an estimate of all that
    capturing takes, that included.
    """

    model: str
    architecture: str
    device: str
    dtype: str
    attention_backend: str
    tensors: int
    weights_digest: str
    hidden: int
    deepstack_levels: int
    projector_applied: bool
    arena_bytes: int
    graph_memory_bytes: int
    paths: list[PathReport]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_text(self) -> str:
        """For people: what was found, then a table of the paths and one of their buffers."""
        facts = [f"{name.replace('_', ' '):18} {value}" for name, value in self.as_dict().items() if name != "paths"]
        paths: list[tuple[str, ...]] = [("path", "graphs", "items", "segments", "longest", "buffer bytes", "budgets")]
        buffers: list[tuple[str, ...]] = [("path", "buffer", "dtype", "shape", "bytes")]
        for report in self.paths:
            budgets = " ".join(map(str, report.budgets))
            numbers = (report.graphs, report.max_items, report.max_segments, report.longest, report.buffer_bytes)
            paths.append((report.path, *map(str, numbers), budgets))
            for name, spec in report.buffers.items():
                shape = " x ".join(map(str, spec["shape"]))
                buffers.append((report.path, name, spec["dtype"], shape, str(spec["bytes"])))
        return "\n".join([*facts, "", *_table(paths), "", *_table(buffers)])


def check(config: Config) -> Report:
    """Read the model, its weights included, and plan its budgets. Raises ConfigError or ModelError."""
    loaded = load(config)
    source, tower = loaded.source, loaded.tower.tower
    estimate = loaded.estimate(config.graph_memory_bytes) if config.graphs else 0
    return Report(
        model=source.name,
        architecture=source.architecture,
        device=str(tower.device),
        dtype=str(tower.dtype).removeprefix("torch."),
        attention_backend=loaded.tower.attention_backend,
        tensors=loaded.tower.tensors,
        weights_digest=loaded.tower.weights_digest,
        hidden=tower.planner.layout.hidden,
        deepstack_levels=tower.planner.layout.deepstack_levels,
        projector_applied=tower.planner.layout.projector_applied,
        arena_bytes=loaded.graphs.arena_bytes,
        graph_memory_bytes=estimate,
        paths=[_path_report(tower, path, planned, config.graphs) for path, planned in loaded.capacities.items()],
    )


def _path_report(tower: Tower, path: str, capacities: list[Capacity], captured: bool) -> PathReport:
    specs = tower.buffers(path, capacities[-1])
    return PathReport(
        path=path,
        budgets=sorted({capacity.units for capacity in capacities}),
        graphs=len(capacities) if captured else 0,
        max_items=max(capacity.items for capacity in capacities),
        max_segments=max(capacity.segments for capacity in capacities),
        longest=max(capacity.longest for capacity in capacities),
        buffers={name: _buffer(spec) for name, spec in specs.items()},
        buffer_bytes=Packing.of(specs).size,
    )


def _buffer(spec: BufferSpec) -> dict[str, Any]:
    return {"shape": list(spec.shape), "dtype": spec.dtype, "bytes": spec.nbytes}


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return ["  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows]
