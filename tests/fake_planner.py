"""A planner without torch: sides are padded to multiples of 8 with their edge pixels; a token is 8 x 8 pixels.

Of a video every frame is taken, or the first sampling.num_frames; each is a group of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from opticnerve_server.models.base import ImageItem, PathSpec, PlanError, VideoItem
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

    modalities = ("image", "video")

    def plan(self, item: ImageItem | VideoItem) -> ItemPlan:
        if not min(item.height, item.width) > 0 or max(item.height, item.width) > MAX_SIDE:
            raise PlanError(f"{item.height} x {item.width} pixels: sides must lie in 1 to {MAX_SIDE}, resize the image")
        height, width = -(-item.height // SIDE) * SIDE, -(-item.width // SIDE) * SIDE
        if isinstance(item, ImageItem):
            return self._plan("image", 1, height, width)
        if not item.fps > 0:
            raise PlanError(f"the video's rate is {item.fps}: set its fps")
        taken = range(item.sampling.num_frames or item.frames)
        times = tuple(index / item.fps for index in taken)
        return msgspec.structs.replace(
            self._plan("video", len(taken), height, width), frame_indices=tuple(taken), timestamps=times
        )

    def plan_patches(self, kind: str, grid: tuple[int, int, int], shape: tuple[int, ...]) -> ItemPlan:
        if shape != (grid[0] * grid[1] * grid[2], 3 * PATCH * PATCH):
            raise PlanError(f"the patches are of shape {list(shape)}")
        return self._plan(kind, grid[0], grid[1] * PATCH, grid[2] * PATCH)

    def _plan(self, kind: str, frames: int, height: int, width: int) -> ItemPlan:
        tokens = height * width // SIDE**2
        span = Span("image" if kind == "image" else "frame", tokens)
        return ItemPlan(
            kind=kind,
            height=height,
            width=width,
            grid=(frames, height // PATCH, width // PATCH),
            merge=MERGE,
            tokens=frames * tokens,
            paths={"default": PathPlan(frames * tokens, frames, tokens * MERGE * MERGE, frames * height * width * 3)},
            spans=(span,) * frames,
        )

    def fill_pixels(
        self, media: npt.NDArray[np.uint8] | Iterable[npt.NDArray[np.uint8]], plan: ItemPlan, out: npt.NDArray[np.uint8]
    ) -> None:
        frames = [media] if isinstance(media, np.ndarray) else media
        targets = out.reshape(-1, plan.height, plan.width, 3)
        for frame, target in zip(frames, targets, strict=True):
            rows, columns = plan.height - frame.shape[0], plan.width - frame.shape[1]
            target[:] = np.pad(frame, ((0, rows), (0, columns), (0, 0)), mode="edge")

    def fill_patches(self, patches: npt.NDArray[np.generic], plan: ItemPlan, out: npt.NDArray[np.uint8]) -> None:
        out[:] = patches.ravel()
