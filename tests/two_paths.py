"""Images through the dispatcher of a tower of two paths, in process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from opticnerve_server.bench.inprocess import InProcessEngine
from opticnerve_server.graphs import GraphManager, plan_capacities
from opticnerve_server.models.base import ImageItem
from opticnerve_server.selftest import self_test
from opticnerve_server.types import Launch


def engine_of(tower: Any, budgets: dict[str, tuple[int, ...]], use_graphs: bool = True) -> InProcessEngine:
    """Budgets are in units, by path; graphs are captured and tried."""
    paths = tower.planner.paths
    tokens = {path: tuple(count * paths[path].tokens_per_unit for count in counts) for path, counts in budgets.items()}
    planned = plan_capacities(paths, explicit=tokens, cap=None, max_items=None, launch=Launch.ROWS)
    graphs = GraphManager(tower, planned)
    if use_graphs:
        with torch.inference_mode():
            graphs.capture(lambda *_: None, on_failure="fail")
            self_test(graphs, lambda *_: None)
    return InProcessEngine(tower, graphs, planned, use_graphs=use_graphs, slot_bytes=64 << 20)


def run(engine: InProcessEngine, images: list[np.ndarray]) -> torch.Tensor:
    """The rows of all images of one call, in order."""
    planner = engine.tower.planner
    plans = [planner.plan(ImageItem(*image.shape[:2])) for image in images]
    pixels = [np.empty(plan.pixel_bytes, np.uint8) for plan in plans]
    for image, plan, out in zip(images, plans, pixels, strict=True):
        planner.fill_pixels(image, plan, out)
    items = engine.place(plans, pixels, "float32")
    engine.run(items)
    rows = torch.cat([engine.rows(item) for item in items])
    engine.free(items)
    return rows
