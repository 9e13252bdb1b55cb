"""The planner of the towers that cut an image into one (t, h, w) grid of patches: Qwen2-VL and everything like it.

Official arithmetic: `smart_resize` of transformers' Qwen2VLImageProcessor. The slot holds the resized image itself,
uint8 RGB rows from the top; the order of patches is a gather in the tower's `forward`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from ..types import ItemPlan, Layout, PathPlan, Span
from .base import ImageItem, PathSpec, PlanError
from .processor import read_processor

PATH = "default"
"""Name of the one path of these towers."""

MAX_ASPECT = 200
"""The official processors refuse an image whose longer side is more than this many times the shorter one."""


class ResizeRule(Protocol):
    """From the size of an image to its size after the processor's resize, both sides multiples of `factor`."""

    def __init__(self, *, factor: int, min_pixels: int, max_pixels: int) -> None: ...

    def __call__(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after the resize, for sides of at least 1 and an aspect of at most MAX_ASPECT."""
        ...

    @property
    def max_tokens(self) -> int:
        """No image comes out with more tokens (squares of `factor` pixels) than this."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StillResize:
    """The rule of Qwen images: the nearest multiples of `factor`, scaled until the pixels lie between the two limits.

    `round` is half-to-even and the order of the floating-point operations is the official one; both decide sizes.
    """

    factor: int
    min_pixels: int
    max_pixels: int

    def __call__(self, height: int, width: int) -> tuple[int, int]:
        factor = self.factor
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor**2 > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            rows = max(1, math.floor(height / shrink / factor))
            columns = max(1, math.floor(width / shrink / factor))
        elif rows * columns * factor**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
        return rows * factor, columns * factor

    @property
    def max_tokens(self) -> int:
        """The limit itself, unless it is so small, or the minimum so large, that a strip of MAX_ASPECT exceeds it."""
        least, most = self.min_pixels / self.factor**2, self.max_pixels / self.factor**2
        shrunk_strip = math.sqrt(most * MAX_ASPECT)  # one row high: its shorter side is raised to `factor`
        grown_strip = least + math.sqrt(least * MAX_ASPECT) + math.sqrt(least / MAX_ASPECT) + 1  # both sides rounded up
        return math.floor(max(most, shrunk_strip, grown_strip))


@dataclass(kw_only=True, slots=True, eq=False)
class GridPlanner:
    """Planner of one (t, h, w) model; see `base.Planner`. Immutable by convention, hence thread-safe.

    `patch` and `merge` are sides in pixels and in patches; `mean` and `std` are of values scaled to 0..1, in RGB order.
    Raises ValueError when a number makes no sense.
    """

    architecture: str
    layout: Layout
    patch: int
    merge: int
    temporal_patch: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resize_rule: type[ResizeRule] = StillResize
    min_units: int = 64
    paths: dict[str, PathSpec] = field(init=False)
    _resize: ResizeRule = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("patch", "merge", "temporal_patch", "min_pixels", "min_units"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.max_pixels < self.min_pixels:
            raise ValueError(f"max_pixels {self.max_pixels} is below min_pixels {self.min_pixels}")
        if min(self.std) <= 0:
            raise ValueError(f"std {self.std} must be positive")
        self._resize = self.resize_rule(
            factor=self.patch * self.merge, min_pixels=self.min_pixels, max_pixels=self.max_pixels
        )
        self.paths = {
            PATH: PathSpec(
                min_units=self.min_units, max_units=self._resize.max_tokens, rows_per_unit=self.merge * self.merge
            )
        }

    @classmethod
    def from_processor(
        cls,
        processor: Mapping[str, object],
        *,
        architecture: str,
        layout: Layout,
        patch: int,
        merge: int,
        temporal_patch: int,
    ) -> Self:
        """The planner of a `preprocessor_config.json`, or of a `processor_config.json` that holds one.

        `patch`, `merge` and `temporal_patch` are those of the tower. Raises processor.ProcessorError, which names the
        key, for everything that the official processor would do and this planner does not.
        """
        settings = read_processor(processor, patch=patch, merge=merge, temporal_patch=temporal_patch)
        return cls(
            architecture=architecture,
            layout=layout,
            patch=patch,
            merge=merge,
            temporal_patch=temporal_patch,
            min_pixels=settings.min_pixels,
            max_pixels=settings.max_pixels,
            mean=settings.mean,
            std=settings.std,
        )

    def plan(self, item: ImageItem) -> ItemPlan:
        """See `base.Planner.plan`. Refuses exactly what the official processor refuses."""
        longer, shorter = max(item.height, item.width), min(item.height, item.width)
        if shorter < 1:
            raise PlanError(
                f"the image is {item.height} x {item.width} pixels (height x width): both sides must be at least 1; "
                "send an image that has pixels"
            )
        if longer / shorter > MAX_ASPECT:
            raise PlanError(
                f"the image is {item.height} x {item.width} pixels (height x width): the longer side is "
                f"{longer / shorter:.1f} times the shorter one, this model takes at most {MAX_ASPECT}; crop or pad it"
            )
        height, width = self._resize(item.height, item.width)
        grid = (1, height // self.patch, width // self.patch)
        rows = grid[1] * grid[2]
        tokens = rows // (self.merge * self.merge)
        return ItemPlan(
            kind="image",
            height=height,
            width=width,
            grid=grid,
            merge=self.merge,
            tokens=tokens,
            paths={PATH: PathPlan(units=tokens, segments=1, longest=rows, pixel_bytes=height * width * 3)},
            spans=(Span(kind="image", rows=tokens),),
        )

    def fill_pixels(self, media: npt.NDArray[np.uint8], plan: ItemPlan, out: npt.NDArray[np.uint8]) -> None:
        """Write `media` [H, W, 3], read-only or not, resized to the plan's size into `out` [plan.pixel_bytes].

        Bit-equal to torchvision's antialiased bicubic resize of uint8. An image that has its size already is copied as
        it is, as there.
        """
        target = out.reshape(plan.height, plan.width, 3, copy=False)
        if media.shape == target.shape:
            np.copyto(target, media)
            return
        # A front-end binds its port before it can afford the seconds of this import.
        import torch
        from torch.utils.dlpack import from_dlpack

        # DLPack takes read-only memory without a copy or a warning. Views of HWC memory are also the fastest layout.
        source_1chw = from_dlpack(media).permute(2, 0, 1).unsqueeze(0)
        target_1chw = from_dlpack(target).permute(2, 0, 1).unsqueeze(0)
        # What `interpolate(mode="bicubic", antialias=True)` runs, in the form that writes where it is told: a third of
        # its time goes into a result of its own and the copy from there.
        resize = torch.ops.aten._upsample_bicubic2d_aa.out
        resize(source_1chw, (plan.height, plan.width), False, None, None, out=target_1chw)
