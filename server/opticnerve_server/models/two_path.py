"""What the planners share of the models that see an image whole and, where it is large, its parts too, on two paths.

Units of path `global` are whole views, those of `local` crops. Each takes as many patches and attends to itself alone.
The slot holds the whole view, then the crops in raster order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..types import ItemPlan, Layout, PathPlan
from .base import ImageItem, PathSpec, PlanError, VideoItem

GLOBAL, LOCAL = "global", "local"

NO_PATCHES = "patches of this model are not supported: send the image itself"


@dataclass(frozen=True, slots=True)
class Views:
    """The views of a path: all are squares of `side` pixels, and become as many patches and tokens."""

    side: int
    patches: int
    tokens: int
    nbytes: int  # of the pixels of one
    most: int = 1  # of the views of an image


class TwoPathPlanner(ABC):
    """See `base.Planner`. Immutable by convention, hence thread-safe."""

    def __init__(self, architecture: str, layout: Layout, views: Mapping[str, Views]) -> None:
        self.architecture = architecture
        self.layout = layout
        self.views = views
        self.paths = {
            path: PathSpec(
                min_units=1,
                max_units=kind.most,
                rows_per_unit=kind.patches,
                fixed_units=True,
                tokens_per_unit=kind.tokens,
            )
            for path, kind in views.items()
        }

    @property
    def modalities(self) -> tuple[str, ...]:
        """See `base.Planner.modalities`."""
        return ("image",)

    def plan(self, item: ImageItem | VideoItem) -> ItemPlan:
        """See `base.Planner.plan`."""
        if isinstance(item, VideoItem):
            raise PlanError("this model takes no videos: send their frames as images")
        if min(item.height, item.width) < 1:
            raise PlanError(
                f"the image is {item.height} x {item.width} pixels (height x width): both sides must be at least 1; "
                "send an image that has pixels"
            )
        return self.plan_image(item.height, item.width)

    @abstractmethod
    def plan_image(self, height: int, width: int) -> ItemPlan:
        """The plan of an image of sides of at least 1. Raises PlanError."""

    @abstractmethod
    def fill_pixels(
        self, media: npt.NDArray[np.uint8] | Iterable[npt.NDArray[np.uint8]], plan: ItemPlan, out: npt.NDArray[np.uint8]
    ) -> None:
        """See `base.Planner.fill_pixels`; arrays may be read-only."""

    def units(self, crops: int) -> dict[str, PathPlan]:
        """What an image of so many crops asks of both paths."""
        return {path: self._units(self.views[path], count) for path, count in ((GLOBAL, 1), (LOCAL, crops))}

    def _units(self, kind: Views, count: int) -> PathPlan:
        longest = kind.patches if count else 0
        return PathPlan(units=count, segments=count, longest=longest, pixel_bytes=count * kind.nbytes)

    def split(self, plan: ItemPlan, holds: Callable[[ItemPlan], bool]) -> list[ItemPlan]:
        """See `base.Planner.split`. The rows of an item come from both paths: it stays whole."""
        return [plan]

    def plan_patches(self, kind: str, grid: tuple[int, int, int], shape: tuple[int, ...]) -> ItemPlan:
        """See `base.Planner.plan_patches`."""
        raise PlanError(NO_PATCHES)

    def fill_patches(self, patches: npt.NDArray[np.generic], plan: ItemPlan, out: npt.NDArray[np.uint8]) -> None:
        """See `base.Planner.fill_patches`."""
        raise PlanError(NO_PATCHES)
