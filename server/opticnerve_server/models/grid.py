"""The planner of the towers that cut an image into one (t, h, w) grid of patches: Qwen2-VL and everything like it.

Official arithmetic: `smart_resize` of transformers' Qwen2VLImageProcessor. The slot holds the resized image itself,
uint8 RGB rows from the top; the order of patches is a gather in the tower's `forward`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt

from ..types import ItemPlan, Layout, PathPlan, Span
from .base import ImageItem, PathSpec, PlanError, VideoItem
from .clip import NO_CLIPS, Clip, ClipRule, NoClips, clip_plan
from .patches import PatchFormat
from .processor import QWEN2_VL, ProcessorClass, read_processor
from .resize import Resize, torch_bicubic

PATH = "default"
"""Name of the one path of these towers."""

MAX_ASPECT = 200
"""The official processors refuse an image whose longer side is more than this many times the shorter one."""


class ResizeRule(Protocol):
    """From the size of an image to its size after the processor's resize, both sides whole tokens."""

    def __call__(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after the resize, for sides of at least 1. Raises PlanError where the processor refuses."""
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
        """See ResizeRule."""
        check_aspect(height, width, enlarged=(height, width))
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
        """See ResizeRule."""
        return _max_tokens(self.min_pixels / self.factor**2, self.max_pixels / self.factor**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipResize:
    """The rule of GLM images and of clips: as StillResize, but the limits are of all frames together, a still counting
    as `temporal_patch` of them, and sides below `factor` are enlarged to it first, cut off to whole pixels.
    """

    factor: int
    min_pixels: int
    max_pixels: int
    temporal_patch: int = 2

    def __call__(self, height: int, width: int, frames: int | None = None) -> tuple[int, int]:
        """See ResizeRule. The limits apply to `frames` rounded to whole groups, the scale follows from `frames`."""
        factor, count = self.factor, frames or self.temporal_patch
        grouped = round(count / self.temporal_patch) * self.temporal_patch
        original = (height, width)
        if min(original) < factor:
            enlarge = max(factor / height, factor / width)
            height, width = int(height * enlarge), int(width * enlarge)
        check_aspect(*original, enlarged=(height, width))
        rows, columns = round(height / factor), round(width / factor)
        if grouped * rows * columns * factor**2 > self.max_pixels:
            shrink = math.sqrt((count * height * width) / self.max_pixels)
            rows = max(1, math.floor(height / shrink / factor))
            columns = max(1, math.floor(width / shrink / factor))
        elif grouped * rows * columns * factor**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (count * height * width))
            rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
        return rows * factor, columns * factor

    @property
    def max_tokens(self) -> int:
        """See ResizeRule."""
        pixels_per_token = self.temporal_patch * self.factor**2
        return _max_tokens(self.min_pixels / pixels_per_token, self.max_pixels / pixels_per_token)


def check_aspect(height: int, width: int, *, enlarged: tuple[int, int]) -> None:
    """Raise PlanError for an image longer than MAX_ASPECT times its shorter side, measured as `enlarged`."""
    aspect = max(enlarged) / min(enlarged)
    if aspect > MAX_ASPECT:
        raise PlanError(
            f"the image is {height} x {width} pixels (height x width): the longer side is {aspect:.1f} times the "
            f"shorter one, this model takes at most {MAX_ASPECT}; crop or pad it"
        )


def _max_tokens(least: float, most: float) -> int:
    """The limit itself, unless it is so small, or the minimum so large, that a strip of MAX_ASPECT exceeds it."""
    shrunk_strip = math.sqrt(most * MAX_ASPECT)  # one row high: its shorter side is raised to `factor`
    grown_strip = least + math.sqrt(least * MAX_ASPECT) + math.sqrt(least / MAX_ASPECT) + 1  # both sides rounded up
    return math.floor(max(most, shrunk_strip, grown_strip))


@dataclass(kw_only=True, slots=True, eq=False)
class GridPlanner:
    """Planner of one (t, h, w) model; see `base.Planner`. Immutable by convention, hence thread-safe.

    `patch` and `merge` are sides in pixels and in patches; `mean` and `std` are of values scaled to 0..1, in RGB order.
    `fold` temporal groups of a video share their tokens, a token being as many units. `max_clip_units` is of the
    largest video, where that is larger than the largest image. `lay` brings an image or a frame to the size that
    `resize` says. `patch_format` is that of the official processor's patches, `positions` are the columns and rows that
    the tower has, 0: any. Raises ValueError when a number makes no sense.
    """

    architecture: str
    layout: Layout
    patch: int
    merge: int
    temporal_patch: int
    resize: ResizeRule
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    fold: int = 1
    min_units: int = 64
    max_clip_units: int = 0
    clips: ClipRule = NO_CLIPS
    patch_format: type[PatchFormat] = PatchFormat
    positions: int = 0
    lay: Resize = torch_bicubic
    paths: dict[str, PathSpec] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("patch", "merge", "temporal_patch", "fold", "min_units"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if min(self.std) <= 0:
            raise ValueError(f"std {self.std} must be positive")
        largest = max(self.resize.max_tokens, self.max_clip_units)
        self.paths = {
            PATH: PathSpec(min_units=self.min_units, max_units=largest, rows_per_unit=self.merge * self.merge)
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
        kind: ProcessorClass = QWEN2_VL,
        fold: int = 1,
        resize_rule: type[StillResize | ClipResize] = StillResize,
    ) -> Self:
        """The planner of a `preprocessor_config.json`, or of a `processor_config.json` that holds one.

        `patch`, `merge` and `temporal_patch` are those of the tower, `kind` is its family's processor. Raises
        processor.ProcessorError, which names the key, for everything that the official processor would do and this
        planner does not.
        """
        settings = read_processor(processor, kind, patch=patch, merge=merge, temporal_patch=temporal_patch)
        return cls(
            architecture=architecture,
            layout=layout,
            patch=patch,
            merge=merge,
            temporal_patch=temporal_patch,
            resize=resize_rule(factor=patch * merge, min_pixels=settings.min_pixels, max_pixels=settings.max_pixels),
            mean=settings.mean,
            std=settings.std,
            fold=fold,
        )

    @property
    def modalities(self) -> tuple[str, ...]:
        """See `base.Planner.modalities`."""
        return ("image",) if isinstance(self.clips, NoClips) else ("image", "video")

    def plan(self, item: ImageItem | VideoItem) -> ItemPlan:
        """See `base.Planner.plan`. Refuses exactly what the official processor refuses."""
        return self._plan_video(self.clips(item)) if isinstance(item, VideoItem) else self._plan_image(item)

    def _plan_video(self, clip: Clip) -> ItemPlan:
        return clip_plan(clip, path=PATH, patch=self.patch, merge=self.merge, fold=self.fold)

    def _plan_image(self, item: ImageItem) -> ItemPlan:
        if min(item.height, item.width) < 1:
            raise PlanError(
                f"the image is {item.height} x {item.width} pixels (height x width): both sides must be at least 1; "
                "send an image that has pixels"
            )
        return self._still(*self.resize(item.height, item.width))

    def _still(self, height: int, width: int) -> ItemPlan:
        """The plan of an image whose size after the resize this is."""
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

    def split(self, plan: ItemPlan, holds: Callable[[ItemPlan], bool]) -> list[ItemPlan]:
        """See `base.Planner.split`. Temporal groups attend to themselves alone: a clip may be cut between any two that
        share no tokens.
        """
        steps = plan.grid[0] // self.fold
        if steps <= 1 or holds(plan):
            return [plan]
        size = bisect.bisect_left(range(1, steps), True, key=lambda count: not holds(self._part(plan, 0, count)))
        if not size:
            return [plan]
        return [self._part(plan, first, min(first + size, steps)) for first in range(0, steps, size)]

    def _part(self, plan: ItemPlan, first: int, end: int) -> ItemPlan:
        """The part of a clip from step `first` up to `end`, a step being `fold` temporal groups."""
        whole, groups = plan.paths[PATH], (end - first) * self.fold
        frame, per_step = plan.height * plan.width * 3, self.temporal_patch * self.fold
        frames = min(end * per_step, whole.pixel_bytes // frame) - first * per_step
        units = whole.units // plan.grid[0] * groups
        return msgspec.structs.replace(
            plan,
            grid=(groups, *plan.grid[1:]),
            tokens=units // self.fold,
            paths={PATH: PathPlan(units, groups, whole.longest, frames * frame)},
            spans=plan.spans[first:end],
        )

    def fill_pixels(
        self, media: npt.NDArray[np.uint8] | Iterable[npt.NDArray[np.uint8]], plan: ItemPlan, out: npt.NDArray[np.uint8]
    ) -> None:
        """See `base.Planner.fill_pixels`; arrays may be read-only. A video's frames lie one behind another.

        Bit-equal to the official resize. Raises ValueError for another number of frames than planned.
        """
        targets = out.reshape(-1, plan.height, plan.width, 3, copy=False)
        if plan.kind == "video":
            for frame, target in zip(self.clips.prepare(media, plan), targets, strict=True):
                self.lay(frame, target)
        else:
            assert isinstance(media, np.ndarray)
            (target,) = targets
            self.lay(media, target)

    def plan_patches(self, kind: str, grid: tuple[int, int, int], shape: tuple[int, ...]) -> ItemPlan:
        """See `base.Planner.plan_patches`."""
        self._patch_format.check(kind, grid, shape)
        t, height, width = grid[0], grid[1] * self.patch, grid[2] * self.patch
        if kind == "image":
            return self._still(height, width)
        frames = t * self.temporal_patch
        clip = Clip(
            frame_indices=tuple(range(frames)),
            frame_times=(0.0,) * frames,
            timestamps=(0.0,) * (t // self.fold),
            height=height,
            width=width,
        )
        return msgspec.structs.replace(self._plan_video(clip), frame_indices=(), timestamps=())

    def fill_patches(self, patches: npt.NDArray[np.generic], plan: ItemPlan, out: npt.NDArray[np.uint8]) -> None:
        """See `base.Planner.fill_patches`."""
        self._patch_format.restore(patches, plan, out)

    @property
    def _patch_format(self) -> PatchFormat:
        return self.patch_format(
            patch=self.patch,
            merge=self.merge,
            temporal_patch=self.temporal_patch,
            fold=self.fold,
            mean=self.mean,
            std=self.std,
            positions=self.positions,
        )
