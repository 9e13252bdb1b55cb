"""From the settings to a tower and the graphs planned for it: what `serve` and `check` have in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .config import Config, parse_token_budgets
from .graphs import GraphManager, plan_capacities
from .models import registry
from .models.registry import LoadedTower, ModelSource
from .settings import ConfigError
from .types import Capacity


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory, and its graphs before capture."""

    source: ModelSource
    tower: LoadedTower
    capacities: dict[str, list[Capacity]]
    graphs: GraphManager

    def estimate(self, limit: int | None) -> int:
        """Bytes that capture will take. Raises ConfigError over `limit`."""
        with torch.inference_mode():
            estimate = self.graphs.estimate()
        if limit is not None and estimate > limit:
            raise ConfigError(
                f"graphs would take about {estimate} bytes, over graph_memory_bytes = {limit}: lower "
                "--max-token-budget, raise the limit, or run with --no-graphs"
            )
        return estimate


def load(config: Config) -> Loaded:
    """Read the model with its weights, plan budgets, lay out buffers. Raises ConfigError or ModelError."""
    source = registry.open_model(config.model, config.load_format, projector=config.projector)
    planner = registry.build_planner(source)
    try:
        tower = registry.build_tower(
            source,
            planner,
            load_format=config.load_format,
            device=config.device,
            dtype=config.dtype,
            attention_backend=config.attention_backend,
            kernels=config.kernels,
        )
        capacities = plan_capacities(
            planner.paths,
            explicit=parse_token_budgets(config.token_budgets),
            cap=config.token_cap(tower.tower.device.type),
            max_items=config.max_items_per_batch,
            launch=tower.launch,
        )
    except registry.ModelError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        graphs = GraphManager(tower.tower, capacities)
    except RuntimeError as error:  # what torch raises where there is no memory, on a CPU and on a GPU
        largest = max(capacity.units for planned in capacities.values() for capacity in planned)
        raise ConfigError(
            f"the buffers of a budget of {largest} units do not fit into memory: lower --token-budgets or "
            "--max-token-budget"
        ) from error
    return Loaded(source, tower, capacities, graphs)
