"""The smallest batch of every path, over and over: whether the device computes, and what it computed when it started.

It tells the two ways apart in which a batch can fail. Where the sentinel fails too, the device, the libraries or the
memory are to blame, and a restart or time may help; where it does not, something in the batch is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from .buffers import Packing
from .graphs import Graph, GraphManager, eager_capacity
from .selftest import TOLERANCE, sample_parts, used_lines, write_batch
from .types import Capacity, ItemPlan, Load

SEED = 0


class SentinelFailed(RuntimeError):
    """The rows are not those that they were."""


class Sentinel:
    """Its first run, when it is made, says what the rows must be. Device thread only; nothing else may be running."""

    def __init__(self, graphs: GraphManager, capacities: Mapping[str, Sequence[Capacity]]) -> None:
        """`capacities` are the planned ones, ascending, whether or not they were captured. Raises as `run` does."""
        self._graphs = graphs
        samples = {
            path: next(filter(None, (sample_parts(graphs.tower.planner, path, each) for each in planned)), [])
            for path, planned in capacities.items()
        }
        self._samples = {path: parts for path, parts in samples.items() if parts}
        self._known = list(self._rows())
        self.run()  # twice the same: only then can it tell what is wrong

    def run(self) -> None:
        """Run every path eagerly, and by replay where it has a graph. Raises SentinelFailed, or what they do."""
        for known, rows in zip(self._known, self._rows(), strict=True):
            error = ((rows - known).float().norm() / known.float().norm()).item()
            if not error <= TOLERANCE[rows.dtype]:  # NaN is not
                raise SentinelFailed(f"rows differ by {error:.1e} (relative) from those at the start")

    def _rows(self) -> Iterator[torch.Tensor]:
        with torch.inference_mode():
            for path, parts in self._samples.items():
                yield self._eager(path, parts)
                replayed = self._replayed(path, parts)
                if replayed is not None:
                    yield replayed

    def _eager(self, path: str, parts: Sequence[ItemPlan]) -> torch.Tensor:
        tower = self._graphs.tower
        capacity = eager_capacity(tower.planner.paths[path], _load(path, parts))
        packing = Packing.of(tower.buffers(path, capacity))
        block = torch.empty(packing.size, dtype=torch.uint8, device=tower.device)
        output = tower.forward(path, write_batch(tower, path, parts, packing, block, SEED), capacity)
        return self._used(path, parts, output)

    def _replayed(self, path: str, parts: Sequence[ItemPlan]) -> torch.Tensor | None:
        graphs = self._graphs
        graph = graphs.choose(path, _load(path, parts))
        if not isinstance(graph, Graph):
            return None
        write_batch(graphs.tower, path, parts, graph.packing, graphs.arena, SEED)
        graph.replay()
        return self._used(path, parts, graph.output)

    def _used(self, path: str, parts: Sequence[ItemPlan], output: torch.Tensor) -> torch.Tensor:
        lines = used_lines(self._graphs.tower, path, parts, output.shape[0])
        return output[torch.from_numpy(lines).to(output.device)]


def _load(path: str, parts: Sequence[ItemPlan]) -> Load:
    return Load.of(part.paths[path] for part in parts)
