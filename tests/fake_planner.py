"""A planner without torch: sides are padded to multiples of 8 with their edge pixels; a token is 8 x 8 pixels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from opticnerve_server.models.base import ImageItem, PathSpec, PlanError
from opticnerve_server.types import ItemPlan, Layout, PathPlan, Span

PATCH, MERGE = 4, 2
SIDE = PATCH * MERGE
MAX_SIDE = 4096


class FakePlanner:
    architecture = "fake"
    layout = Layout(hidden=16, deepstack_levels=1)
    paths: dict[str, PathSpec] = {  # noqa: RUF012 - never changed
        "default": PathSpec(min_units=1, max_units=(MAX_SIDE // SIDE) ** 2, rows_per_unit=MERGE * MERGE)
    }

    def plan(self, item: ImageItem) -> ItemPlan:
        if not min(item.height, item.width) > 0 or max(item.height, item.width) > MAX_SIDE:
            raise PlanError(f"{item.height} x {item.width} pixels: sides must lie in 1 to {MAX_SIDE}, resize the image")
        height, width = -(-item.height // SIDE) * SIDE, -(-item.width // SIDE) * SIDE
        tokens = height * width // SIDE**2
        return ItemPlan(
            kind="image",
            height=height,
            width=width,
            grid=(1, height // PATCH, width // PATCH),
            merge=MERGE,
            tokens=tokens,
            paths={"default": PathPlan(tokens, 1, tokens * MERGE * MERGE, height * width * 3)},
            spans=(Span("image", tokens),),
        )

    def fill_pixels(self, media: npt.NDArray[np.uint8], plan: ItemPlan, out: npt.NDArray[np.uint8]) -> None:
        rows, columns = plan.height - media.shape[0], plan.width - media.shape[1]
        padded = np.pad(media, ((0, rows), (0, columns), (0, 0)), mode="edge")
        out.reshape(padded.shape)[:] = padded
