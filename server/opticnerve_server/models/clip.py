"""What a video becomes: its frames, their size and the time of each temporal group, then the plan of a grid model.

Official arithmetic: `smart_resize` and `resize` of transformers' video processors; times as its processors write them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..types import ItemPlan, PathPlan, Span
from .base import PlanError, VideoItem

Frame = npt.NDArray[np.uint8]
"""One frame: RGB, [height, width, 3]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """A video as a model sees it."""

    frame_indices: tuple[int, ...]  # in the source, ascending; a frame that only pads the last group is not repeated
    frame_times: tuple[float, ...]  # seconds, of each of these
    timestamps: tuple[float, ...]  # seconds, of each temporal group
    height: int  # pixels after the resize
    width: int
    second_per_grid_ts: float = 0.0


class ClipSize(Protocol):
    """From the number of sampled frames and their size to the size after the resize."""

    def __call__(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width. Raises PlanError for a clip that the official processor refuses."""
        ...


@dataclass(frozen=True, slots=True)
class EachFrame:
    """Frames are resized as if each were a picture, by the rule of pictures with the limits of videos."""

    rule: Callable[[int, int], tuple[int, int]]  # height, width

    def __call__(self, frames: int, height: int, width: int) -> tuple[int, int]:
        return self.rule(height, width)


@dataclass(frozen=True, slots=True)
class WholeClip:
    """The limits hold for the pixels of all frames together, of which there are at least `temporal_patch`."""

    rule: Callable[[int, int, int], tuple[int, int]]  # height, width, frames
    temporal_patch: int

    def __call__(self, frames: int, height: int, width: int) -> tuple[int, int]:
        if frames < self.temporal_patch:
            raise PlanError(
                f"{frames} frame would be sampled, this model takes at least {self.temporal_patch}: "
                "send a longer video, or an image"
            )
        return self.rule(height, width, frames)


@dataclass(frozen=True, slots=True)
class OneTileEach:
    """Every frame is resized to a square, whatever its aspect."""

    side: int

    def __call__(self, frames: int, height: int, width: int) -> tuple[int, int]:
        return self.side, self.side


class ClipRule(Protocol):
    """How a model sees videos: built from its settings alone, thread-safe."""

    def __call__(self, item: VideoItem) -> Clip:
        """Pure arithmetic. Raises PlanError."""
        ...

    def prepare(self, frames: Iterable[Frame], plan: ItemPlan) -> Iterator[Frame]:
        """The frames as they go into the resize, one by one; an array that is yielded may be one that was taken."""
        ...


@dataclass(frozen=True, slots=True)
class NoClips:
    """The rule of a model that takes no videos, for a reason that ends with what helps."""

    reason: str

    def __call__(self, item: VideoItem) -> Clip:
        raise PlanError(self.reason)

    def prepare(self, frames: Iterable[Frame], plan: ItemPlan) -> Iterator[Frame]:
        raise PlanError(self.reason)


NO_CLIPS = NoClips("this model has no settings for videos: send images")


class Sampler(Protocol):
    """See sampling.FrameSampler."""

    def __call__(self, item: VideoItem) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledClips:
    """Sample, then resize."""

    sample: Sampler
    resize: ClipSize
    temporal_patch: int
    centred: bool = False  # the time of a group is the middle of its first and last frame, not its first
    seconds_per_grid: bool = False  # second_per_grid_ts is given
    stamps: Stamps | None = None

    def __call__(self, item: VideoItem) -> Clip:
        if min(item.height, item.width) < 1:
            raise PlanError(
                f"the frames are {item.height} x {item.width} pixels (height x width): both sides must be at least 1; "
                "send frames that have pixels"
            )
        if self.stamps is not None:
            self.stamps.check(item.height, item.width)
        taken = self.sample(item)
        height, width = self.resize(len(taken), item.height, item.width)
        stored = tuple(dict.fromkeys(taken))
        padded = taken + taken[-1:] * (-len(taken) % self.temporal_patch)
        times = [index / item.fps for index in padded]
        group = self.temporal_patch
        firsts, lasts = times[::group], times[group - 1 :: group]
        return Clip(
            frame_indices=stored,
            frame_times=tuple(times[: len(stored)]),
            timestamps=tuple(
                (first + last) / 2 if self.centred else first for first, last in zip(firsts, lasts, strict=True)
            ),
            height=height,
            width=width,
            second_per_grid_ts=group / (len(taken) / item.frames * item.fps) if self.seconds_per_grid else 0.0,
        )

    def prepare(self, frames: Iterable[Frame], plan: ItemPlan) -> Iterator[Frame]:
        if self.stamps is None:
            yield from frames
        else:
            yield from self.stamps.draw(frames, plan.timestamps)


class Stamps(Protocol):
    """See stamps.TimeStamps."""

    def check(self, height: int, width: int) -> None: ...

    def draw(self, frames: Iterable[Frame], seconds: Iterable[float]) -> Iterator[Frame]: ...


def clip_plan(clip: Clip, *, path: str, patch: int, merge: int, fold: int = 1) -> ItemPlan:
    """The plan of a model with one path, a unit a token of `merge` x `merge` patches of one temporal group.

    `fold`: where the tower takes frames one by one and folds so many into a token behind them (ERNIE-4.5-VL), the grid
    and its timestamps count frames and a token is that many units.
    """
    groups, rows, columns = len(clip.timestamps), clip.height // patch, clip.width // patch
    segments, patches = groups * fold, rows * columns
    units = segments * patches // merge**2
    times = clip.timestamps
    if fold > 1:
        times = clip.frame_times + clip.frame_times[-1:] * (segments - len(clip.frame_times))
    return ItemPlan(
        kind="video",
        height=clip.height,
        width=clip.width,
        grid=(segments, rows, columns),
        merge=merge,
        tokens=units // fold,
        paths={
            path: PathPlan(
                units=units,
                segments=segments,
                longest=patches,
                pixel_bytes=len(clip.frame_indices) * clip.height * clip.width * 3,
            )
        },
        spans=tuple(Span(kind="frame", rows=patches // merge**2, timestamp=time) for time in clip.timestamps),
        frame_indices=clip.frame_indices,
        timestamps=times,
        second_per_grid_ts=clip.second_per_grid_ts,
    )
