"""What sampling refuses and why; what it takes is compared with the official processors in golden/test_clips.py."""

from __future__ import annotations

import math
from typing import Any

import pytest

from opticnerve_server.models import sampling
from opticnerve_server.models.base import PlanError, Sampling, VideoItem
from opticnerve_server.models.sampling import FrameSampler, SamplingSettings

EVERY = frozenset(Sampling.__slots__)


def sampler(
    rule: sampling.Rule = sampling.qwen3_vl,
    follows: frozenset[str] = EVERY,
    enabled: bool = True,
    **settings: Any,
) -> FrameSampler:
    defaults: dict[str, Any] = {"fps": 2.0, "min_frames": 4, "max_frames": 768}
    return FrameSampler(
        rule=rule, settings=SamplingSettings(**(defaults | settings)), overrides=follows, enabled=enabled
    )


def video(frames: int = 100, rate: float = 25.0, **wanted: Any) -> VideoItem:
    return VideoItem(frames, rate, 360, 640, Sampling(**wanted))


@pytest.mark.parametrize(("wanted", "message"), [
    ({"fps": 1.0, "num_frames": 8}, "both fps and num_frames, .*: set one"),
    ({"fps": 0.0}, r"sampling.fps is 0.0, must be over 0 and at most 1000"),
    ({"fps": math.nan}, "sampling.fps is nan"),
    ({"fps": math.inf}, "sampling.fps is inf"),
    ({"num_frames": 0}, "sampling.num_frames is 0, must be at least 1"),
    ({"num_frames": 101}, "sampling.num_frames is 101, but the video has 100 frames: ask for fewer"),
    ({"min_frames": 0}, "sampling.min_frames is 0"),
    ({"min_frames": 9, "max_frames": 8}, "sampling.min_frames is 9, more than max_frames, 8"),
    ({"num_frames": 9, "max_frames": 8}, "sampling.num_frames is 9, outside"),
    ({"num_frames": 9, "min_frames": 10}, "sampling.num_frames is 9, outside"),
])  # fmt: skip
def test_overrides_that_no_rule_can_follow(wanted: dict[str, Any], message: str) -> None:
    for rule in (sampling.qwen2_vl, sampling.qwen3_vl, sampling.ernie, sampling.gemma4):
        with pytest.raises(PlanError, match=message):
            sampler(rule)(video(**wanted))


def test_overrides_that_the_model_cannot_follow() -> None:
    with pytest.raises(PlanError, match=r"sampling.num_frames is set, but .* can follow fps: unset it"):
        sampler(sampling.glm4v, frozenset({"fps"}), max_duration=300.0)(video(num_frames=8))
    with pytest.raises(PlanError, match=r"sampling.fps is set, but .* can follow none at all"):
        sampler(sampling.glm46v, frozenset())(video(fps=1.0))


@pytest.mark.parametrize(("item", "message"), [
    (video(frames=0), "no frames"),
    (video(rate=0.0), "rate is 0.0 frames per second: set its fps"),
    (video(rate=-1.0), "rate is -1.0"),
    (video(rate=math.nan), "rate is nan"),
    (video(rate=math.inf), "rate is inf"),
    (video(frames=2**40, rate=5e-324), "rate is 5e-324"),
])  # fmt: skip
def test_videos_that_have_no_length(item: VideoItem, message: str) -> None:
    for enabled in (True, False):
        with pytest.raises(PlanError, match=message):
            sampler(enabled=enabled)(item)


def test_too_short_videos() -> None:
    with pytest.raises(PlanError, match="the video has 1 frames, and 2 are to be sampled, a multiple of 2: send more"):
        sampler(sampling.qwen2_vl)(video(1))
    with pytest.raises(PlanError, match=r"lasts 0.080 s .2 frames at 25 a second.: that is too short"):
        sampler(sampling.glm46v, frozenset())(video(2))
    with pytest.raises(PlanError, match=r"20 frames, .* samples 32: send more frames, or set sampling.num_frames"):
        sampler(sampling.gemma4, num_frames=32, fps=None)(video(20))
    with pytest.raises(PlanError, match="8 frames are to be sampled, this model takes 16 to 180"):
        sampler(sampling.ernie, min_frames=16, max_frames=180)(video(num_frames=8))


def test_every_frame_unless_asked_otherwise() -> None:
    off = sampler(sampling.qwen2_vl, enabled=False, fps=None)
    assert off(video(5)) == [0, 1, 2, 3, 4]
    assert off(video(100, fps=1.0)) == [0, 25, 50, 75]
    with pytest.raises(PlanError, match=r"takes every frame: sampling.min_frames and max_frames need sampling.fps"):
        off(video(max_frames=4))


def test_limits_replace_those_of_the_model() -> None:
    assert len(sampler()(video(1000))) == 80
    assert len(sampler()(video(1000, max_frames=10))) == 10
    assert len(sampler()(video(1000, min_frames=90))) == 90
    assert len(sampler()(video(1000, num_frames=3))) == 3
    assert len(sampler(sampling.gemma4, num_frames=32, fps=None)(video(1000, fps=0.1))) == 4


@pytest.mark.parametrize("frames", [1, 1000, 10**5])
def test_no_rule_takes_longer_than_the_video(frames: int) -> None:
    """Rates far from those of videos, asked for and given, must not make a rule loop."""
    for rule in (sampling.qwen2_vl, sampling.qwen3_vl, sampling.ernie, sampling.glm4v, sampling.gemma4):
        for fps, wanted in ((1e-6, 1000.0), (1e9, 1000.0), (1e-6, 1e-6), (25.0, 1000.0)):
            taken: list[int] = []
            try:
                taken = sampler(rule, max_duration=300.0)(VideoItem(frames, fps, 360, 640, Sampling(fps=wanted)))
            except PlanError:
                continue
            assert all(0 <= index < frames for index in taken)
            assert len(taken) <= frames + 1
