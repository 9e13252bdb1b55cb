"""Which frames of a video a model sees: the rules of the official video processors, to the last rounding.

Pure arithmetic on the number and the rate of the frames. The duration of a video is frames / fps everywhere, which is
what the official loaders of video files say; given bare arrays, GLM's processor would guess another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from .base import PlanError, Sampling, VideoItem

MAX_FPS = 1000.0
"""Greatest rate that may be asked for: rules whose work grows with it stay cheap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """The numbers of a video processor that its rule may use; None where it has no such number."""

    fps: float | None = None
    num_frames: int | None = None
    min_frames: int = 1
    max_frames: int = 1
    max_duration: float = 0.0  # seconds
    temporal_patch: int = 2


Rule: TypeAlias = Callable[[int, float, SamplingSettings], list[int]]
"""From the number of frames, their rate and the settings to the indices of the frames to take, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSampler:
    """A processor's rule with its settings. `overrides` are the fields of base.Sampling that the rule can follow."""

    rule: Rule
    settings: SamplingSettings
    overrides: frozenset[str]
    enabled: bool  # do_sample_frames: when False, every frame is taken unless the caller asks for sampling

    def __call__(self, item: VideoItem) -> list[int]:
        """The indices that the official processor takes, ascending, with the repeated last one where it repeats it.

        Work and memory grow with `item.frames`, which the caller bounds. Raises PlanError for a video without frames
        or rate, for overrides that contradict the model or each other, and for a video too short for them.
        """
        if item.frames < 1:
            raise PlanError("the video has no frames: send at least one")
        if not (0 < item.fps < math.inf and item.frames / item.fps < math.inf):
            raise PlanError(
                f"the video's rate is {item.fps} frames per second: set its fps, a positive number, the model's "
                "sampling and timestamps need it"
            )
        settings = self._overridden(item)
        if settings is None:
            return list(range(item.frames))
        indices = self.rule(item.frames, item.fps, settings)
        if not indices:
            raise PlanError(
                f"the video lasts {item.frames / item.fps:.3f} s ({item.frames} frames at {item.fps:g} a second): "
                "that is too short for this model's sampling, send a longer one"
            )
        return indices

    def _overridden(self, item: VideoItem) -> SamplingSettings | None:
        """The settings to sample by; None: take every frame."""
        wanted = {name: value for name in Sampling.__slots__ if (value := getattr(item.sampling, name)) is not None}
        if not wanted:
            return self.settings if self.enabled else None
        _check(item, wanted)
        for name in wanted.keys() - self.overrides:
            known = ", ".join(sorted(self.overrides)) or "none at all"
            raise PlanError(f"sampling.{name} is set, but this model's sampling can follow {known}: unset it")
        settings = replace(self.settings, **wanted)
        if "fps" in wanted:
            settings = replace(settings, num_frames=None)
        elif "num_frames" in wanted:
            settings = replace(settings, fps=None)
        elif settings.fps is None and settings.num_frames is None and not self.enabled:
            raise PlanError("this model takes every frame: sampling.min_frames and max_frames need sampling.fps")
        return settings


def _check(item: VideoItem, wanted: dict[str, float | int]) -> None:
    """Refuse values that no rule can follow."""
    if wanted.keys() >= {"fps", "num_frames"}:
        raise PlanError("sampling has both fps and num_frames, which exclude each other: set one")
    if "fps" in wanted and not 0 < wanted["fps"] <= MAX_FPS:
        raise PlanError(f"sampling.fps is {wanted['fps']}, must be over 0 and at most {MAX_FPS:g}")
    for name in wanted.keys() - {"fps"}:
        if wanted[name] < 1:
            raise PlanError(f"sampling.{name} is {wanted[name]}, must be at least 1")
    least, most, number = (wanted.get(name) for name in ("min_frames", "max_frames", "num_frames"))
    if least is not None and most is not None and least > most:
        raise PlanError(f"sampling.min_frames is {least}, more than max_frames, {most}: exchange them")
    if number is None:
        return
    if number > item.frames:
        raise PlanError(f"sampling.num_frames is {number}, but the video has {item.frames} frames: ask for fewer")
    if not (least or number) <= number <= (most or number):
        raise PlanError(f"sampling.num_frames is {number}, outside sampling.min_frames and max_frames: unset them")


def qwen2_vl(frames: int, fps: float, settings: SamplingSettings) -> list[int]:
    """Qwen2-VL and Qwen2.5-VL: equal steps, a whole number of temporal groups."""
    group = settings.temporal_patch
    if settings.num_frames is not None:
        count = round(settings.num_frames / group) * group
    else:
        assert settings.fps is not None
        most = min(settings.max_frames, frames) // group * group
        wanted = min(max(frames / fps * settings.fps, settings.min_frames), most, frames)
        count = math.floor(wanted / group) * group
    if not 0 < count <= frames:
        raise PlanError(
            f"the video has {frames} frames, and {max(count, group)} are to be sampled, a multiple of {group}: "
            "send more frames, or ask for fewer"
        )
    return _steps(frames, count)


def ernie(frames: int, fps: float, settings: SamplingSettings) -> list[int]:
    """ERNIE-4.5-VL: equal steps, as many frames as the limits allow unless a rate or a number is set."""
    least, most = settings.min_frames, settings.max_frames
    if settings.num_frames is not None:
        if not least <= settings.num_frames <= most:
            raise PlanError(
                f"{settings.num_frames} frames are to be sampled, this model takes {least} to {most}: "
                "set sampling.num_frames between them"
            )
        return _steps(frames, settings.num_frames)
    wanted = frames if settings.fps is None else frames / fps * settings.fps
    return _steps(frames, min(max(wanted, least), most, frames))


def qwen3_vl(frames: int, fps: float, settings: SamplingSettings) -> list[int]:
    """Qwen3-VL and Qwen3.5: equal distances with both ends, rounded half to even."""
    count = settings.num_frames
    if count is None:
        assert settings.fps is not None
        wanted = int(frames / fps * settings.fps)
        count = min(max(wanted, settings.min_frames), settings.max_frames, frames)
    return [int(index) for index in np.linspace(0, frames - 1, count).round()]


def glm4v(frames: int, fps: float, settings: SamplingSettings) -> list[int]:
    """GLM-4.1V: a fixed rate, beyond `max_duration` as many frames as that would have; an even number."""
    assert settings.fps is not None
    duration, last = frames / fps, frames - 1
    most = int(settings.max_duration * settings.fps)
    if duration <= settings.max_duration:
        count = max(math.floor(duration * settings.fps), 1)
        taken = [min(last, math.ceil(i * fps / settings.fps)) for i in range(count)]
    elif most >= frames:
        taken = list(range(frames))
    else:
        taken = [min(last, math.ceil(second * fps)) for second in np.linspace(0, duration, most)]
    return _even(taken)


GLM46V_RATES = ((30, 3.0), (300, 1.0), (2400, 0.5))
"""Up to so many seconds: groups per second. A longer video counts as one of the last."""

GLM46V_MAX_FRAMES = 640


def glm46v(frames: int, fps: float, settings: SamplingSettings) -> list[int]:
    """GLM-4.6V: a rate that falls with the duration, at most 640 frames; an even number."""
    duration, group = frames / fps, settings.temporal_patch
    capped = min(duration, GLM46V_RATES[-1][0])
    rate = next(rate for most, rate in GLM46V_RATES if capped <= most)
    count = min(int(capped * rate * group), GLM46V_MAX_FRAMES)
    if frames < count:
        return _even(_between(0, frames - 1, count))
    taken = _walk(frames, 1 / fps, 1 / (group * rate), int(duration))
    if len(taken) < count:
        taken = _between(taken[0], taken[-1], count)
    elif len(taken) > count:
        taken = _between(0, frames - 1, count)
    return _even(taken)


def gemma4(frames: int, fps: float, settings: SamplingSettings) -> list[int]:
    """Gemma 4: the first frame of each of so many equal parts."""
    count = settings.num_frames
    if count is None:
        assert settings.fps is not None
        count = max(1, int(frames / fps * settings.fps))
    if count > frames:
        raise PlanError(
            f"the video has {frames} frames, this model samples {count}: send more frames, or set sampling.num_frames"
        )
    return [i * frames // count for i in range(count)]


def internvl(frames: int, fps: float, settings: SamplingSettings) -> list[int]:
    """InternVL, transformers' format: the frames in the middle of equal parts."""
    count = _asked(frames, fps, settings)
    return _steps(frames, count, start=frames / count / 2) if count else []


def internvl_chat(frames: int, fps: float, settings: SamplingSettings) -> list[int]:
    """InternVL, the authors' format: about the middle of equal parts, as their model cards' code rounds them."""
    count = _asked(frames, fps, settings)
    part = (frames - 1) / max(count, 1)
    taken = [int(part / 2 + round(part * i)) for i in range(count)]
    if len(set(taken)) < count:
        raise PlanError(
            f"the video has {frames} frames, and {count} parts of it would share some: ask for at most {frames // 2}"
        )
    return taken


def _asked(frames: int, fps: float, settings: SamplingSettings) -> int:
    """How many frames are to be taken by a number or a rate. Raises PlanError if there are not as many."""
    count = settings.num_frames
    if count is None:
        assert settings.fps is not None
        count = int(frames / fps * settings.fps)
    if count > frames:
        raise PlanError(f"the video has {frames} frames, {count} are to be sampled: send more frames, or ask for fewer")
    return count


def _steps(frames: int, count: float, start: float = 0.0) -> list[int]:
    """Whole parts of start, start + step, start + 2 step, ... below `frames`, for step = frames / count, as
    torch.arange rounds them.

    It computes float32 in lanes of eight: the first of a lane is rounded before the others are added to it. Lanes go in
    pairs, what is left behind the last pair goes one by one. That decides frames: near a whole number a rounding falls
    on either side. A step that does not come out even may reach `frames` itself, where no frame is.
    """
    step = frames / count
    i = np.arange(math.ceil((frames - start) / step))
    first = np.where(i < len(i) // 16 * 16, i // 8 * 8, i)
    values = (start + first * step).astype(np.float32) + (i - first) * step
    return [index for value in values.astype(np.float32) if (index := int(value)) < frames]


def _between(first: int, last: int, count: int) -> list[int]:
    """`count` whole parts of equal distances with both ends."""
    return [int(index) for index in np.linspace(first, last, count, dtype=int)]


def _walk(frames: int, frame_seconds: float, step: float, end: int) -> list[int]:
    """The first frame at or behind each multiple of `step` seconds, until `end`; sums and products round as there."""
    taken, threshold = [], 0.0
    for index in range(frames):
        if index * frame_seconds >= threshold:
            threshold += step
            taken.append(index)
            if threshold >= end:
                break
    return taken


def _even(indices: list[int]) -> list[int]:
    """Without repetitions, then the last one once more where their number is odd."""
    unique = list(dict.fromkeys(indices))
    return unique + unique[-1:] * (len(unique) % 2)


def minicpmv(frames: int, fps: float, settings: SamplingSettings) -> list[int]:
    """MiniCPM-V: a fixed whole step, every frame of a slower video; beyond `max_frames` the middles of equal parts."""
    count = settings.num_frames
    if count is not None:
        return _middles(list(range(frames)), count)
    assert settings.fps is not None
    taken = list(range(0, frames, max(1, round(fps / settings.fps))))
    return taken if len(taken) <= settings.max_frames else _middles(taken, settings.max_frames)


def _middles(indices: list[int], count: int) -> list[int]:
    part = len(indices) / count
    return [indices[int(i * part + part / 2)] for i in range(count)]
