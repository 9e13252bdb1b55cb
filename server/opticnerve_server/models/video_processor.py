"""Reads what a video processor of transformers is set to, and refuses by name what this server does not do.

As there, the settings are those of `processor_config.json` under "video_processor", else of
`video_preprocessor_config.json`, else of the image processor's file; `registry.py` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import sampling
from .base import Sampling
from .clip import ClipSize, EachFrame, OneTileEach, SampledClips, WholeClip
from .grid import ClipResize, GridPlanner, StillResize
from .processor import COMMON, PLAIN, ProcessorClass, ProcessorError, read_channels, read_limits, read_settings, require
from .sampling import FrameSampler, SamplingSettings
from .soft_tokens import SOFT_TOKENS, SoftTokenResize
from .stamps import TimeStamps
from .tiles import TilePlanner

QWEN, GLM, ERNIE, GEMMA = "Qwen", "GLM", "ERNIE", "Gemma"


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoProcessorClass:
    """A video processor class of transformers."""

    family: str
    """Models of a family may name each other's classes."""
    defaults: Mapping[str, object]
    """Class defaults: what a key means that is absent or null. Other keys are not its settings."""
    older: Mapping[str, str]
    """Older names of keys of `size`."""
    rule: sampling.Rule
    follows: frozenset[str]
    """The fields of base.Sampling that its rule can follow."""
    temporal_patch: int | None = None
    """Frames of a token; None: those of the tower."""
    whole_clip: bool = False
    """The limits of `size` are of a whole clip, not of each frame."""


_EVERY = frozenset(Sampling.__slots__)
_INERT: Mapping[str, object] = dict.fromkeys(
    ("crop_size", "max_duration", "max_image_size", "max_video_tokens", "return_metadata", "video_metadata")
)
"""Settings of all classes that have no effect on their own: of steps that are off, or that the classes never read."""

_COMMON: Mapping[str, object] = {**COMMON, **_INERT, "fps": None, "num_frames": None, "do_sample_frames": True}
_GLM: Mapping[str, object] = {
    **_COMMON, "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000}, "fps": 2, "num_frames": 16,
    "max_duration": 300,
}  # fmt: skip

CLASSES: Mapping[str, VideoProcessorClass] = {
    "Qwen2VLVideoProcessor": VideoProcessorClass(
        family=QWEN,
        defaults={
            **_COMMON, "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
            "do_sample_frames": False, "min_frames": 4, "max_frames": 768,
        },
        older={"min_pixels": "shortest_edge", "max_pixels": "longest_edge"},
        rule=sampling.qwen2_vl,
        follows=_EVERY,
    ),
    "Qwen3VLVideoProcessor": VideoProcessorClass(
        family=QWEN,
        defaults={
            **_COMMON, "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}, "patch_size": 16,
            "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "fps": 2, "min_frames": 4, "max_frames": 768,
        },
        older={},
        rule=sampling.qwen3_vl,
        follows=_EVERY,
        whole_clip=True,
    ),
    "Glm4vVideoProcessor": VideoProcessorClass(
        family=GLM, defaults=_GLM, older={}, rule=sampling.glm4v, follows=frozenset({"fps"}), whole_clip=True
    ),
    "Glm46VVideoProcessor": VideoProcessorClass(
        family=GLM, defaults=_GLM, older={}, rule=sampling.glm46v, follows=frozenset(), whole_clip=True
    ),
    "Ernie4_5_VLMoeVideoProcessor": VideoProcessorClass(
        family=ERNIE,
        defaults={
            **_COMMON, "size": {"shortest_edge": 299 * 28 * 28, "longest_edge": 1196 * 28 * 28}, "min_frames": 16,
            "max_frames": 180, "draw_on_frames": True, "font": "Roboto-Regular.ttf",
        },
        older={},
        rule=sampling.ernie,
        follows=_EVERY,
        temporal_patch=2,
    ),
    "Gemma4VideoProcessor": VideoProcessorClass(
        family=GEMMA,
        defaults={
            **{key: value for key, value in _COMMON.items() if key not in ("merge_size", "temporal_patch_size")},
            "image_mean": [0.0] * 3, "image_std": [1.0] * 3, "patch_size": 16, "pooling_kernel_size": 3,
            "max_soft_tokens": 70, "num_frames": 32, "size": None,
        },
        older={},
        rule=sampling.gemma4,
        follows=frozenset({"fps", "num_frames"}),
        temporal_patch=1,
    ),
}  # fmt: skip

BY_ARCHITECTURE: Mapping[str, str] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), "Qwen2VLVideoProcessor"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "Qwen3VLVideoProcessor"),
    **dict.fromkeys(("glm4v", "glm4v_moe"), "Glm4vVideoProcessor"),
    "glm46v": "Glm46VVideoProcessor",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeVideoProcessor",
    "gemma4": "Gemma4VideoProcessor",
}
"""The class of a model whose files name none."""

CENTRED = {"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}
"""Architectures whose prompts give the middle of a temporal group; all others that give a time, its first frame's."""

SECONDS_PER_GRID = {"qwen2_5_vl"}
"""Architectures whose positions count seconds."""


def read_clips(video: Mapping[str, object], planner: GridPlanner, directory: Path | None) -> SampledClips:
    """How the model of `planner` sees videos, by its video processor's settings.

    The tower has one mean and one deviation, which must be those of images too. `directory` holds the file of a font;
    None stands for a preset. Raises ProcessorError.
    """
    architecture, patch, merge = planner.architecture, planner.patch, planner.merge
    name = _class_name(video, architecture)
    cls = CLASSES[name]
    kind = ProcessorClass(types=(name,), defaults=cls.defaults, overrides=cls.older)
    settings = read_settings({k: v for k, v in video.items() if not k.endswith("_processor_type")}, kind)
    of_tower, frames = "it must be that of the tower in config.json", cls.temporal_patch or planner.temporal_patch
    if cls.family != GEMMA:  # whose mean and deviation change nothing
        require(settings, "do_normalize", True, "pixels are always normalised")
    require(settings, "patch_size", patch, of_tower)
    require(settings, "pooling_kernel_size" if cls.family == GEMMA else "merge_size", merge, of_tower)
    if "temporal_patch_size" in settings:
        require(settings, "temporal_patch_size", frames, of_tower)
    if (read_channels(settings, "image_mean"), read_channels(settings, "image_std")) != (planner.mean, planner.std):
        raise ProcessorError("image_mean or image_std differ from those of images: the tower has one of each")
    return SampledClips(
        sample=_sampler(settings, cls, frames),
        resize=_resize(settings, cls, kind, factor=patch * merge, temporal_patch=frames),
        temporal_patch=frames,
        centred=architecture in CENTRED,
        seconds_per_grid=architecture in SECONDS_PER_GRID,
        stamps=_stamps(settings, directory) if settings.get("draw_on_frames") else None,
    )


INTERNVL = VideoProcessorClass(
    family="InternVL",
    defaults={
        **PLAIN, **_INERT, "size": {"height": 384, "width": 384}, "fps": None, "num_frames": None,
        "do_sample_frames": False, "initial_shift": True,
    },
    older={},
    rule=sampling.internvl,
    follows=frozenset({"fps", "num_frames"}),
    temporal_patch=1,
)  # fmt: skip


def read_tile_clips(video: Mapping[str, object], planner: TilePlanner) -> SampledClips:
    """How InternVL in transformers' format sees videos: a tile a frame. Raises ProcessorError."""
    name = "InternVLVideoProcessor"
    named = video.get("video_processor_type", name)
    if named != name:
        raise ProcessorError(f"video_processor_type is {named!r}, this model's is {name}")
    # Where there is but one file, it is the image processor's: what is of tiles there has no meaning here.
    of_images = ("crop_to_patches", "min_patches", "max_patches") if "image_processor_type" in video else ()
    given = {k: v for k, v in video.items() if not k.endswith("_processor_type") and k not in of_images}
    settings = read_settings(given, ProcessorClass(types=(name,), defaults=INTERNVL.defaults))
    size = {"height": planner.side, "width": planner.side}
    require(settings, "do_normalize", True, "pixels are always normalised")
    require(settings, "size", size, "it must be that of the tower in config.json")
    require(settings, "initial_shift", True, "frames are taken from the middle of equal parts")
    if (read_channels(settings, "image_mean"), read_channels(settings, "image_std")) != (planner.mean, planner.std):
        raise ProcessorError("image_mean or image_std differ from those of images: the tower has one of each")
    return SampledClips(
        sample=_sampler(settings, INTERNVL, temporal_patch=1), resize=OneTileEach(planner.side), temporal_patch=1
    )


def _class_name(video: Mapping[str, object], architecture: str) -> str:
    """The class that the settings name; where they are an image processor's, the one beside that."""
    default = BY_ARCHITECTURE[architecture]
    name = video.get("video_processor_type")
    if name is None:
        name = str(video.get("image_processor_type")).replace("ImageProcessor", "VideoProcessor")
        return name if name in CLASSES else default
    known = [key for key, cls in CLASSES.items() if cls.family == CLASSES[default].family]
    if name not in known:
        raise ProcessorError(f"video_processor_type is {name!r}, this model's is one of {known}")
    return str(name)


def _sampler(settings: Mapping[str, Any], cls: VideoProcessorClass, temporal_patch: int) -> FrameSampler:
    for key in ("fps", "num_frames", "min_frames", "max_frames", "max_duration"):
        value = settings.get(key)
        whole = key.endswith("frames")
        if value is not None and (type(value) not in ((int,) if whole else (int, float)) or value <= 0):
            raise ProcessorError(f"{key} is {value!r}, must be a positive {'whole number' if whole else 'number'}")
    if type(settings["do_sample_frames"]) is not bool:
        raise ProcessorError(f"do_sample_frames is {settings['do_sample_frames']!r}, must be true or false")
    both = settings["fps"] is not None and settings["num_frames"] is not None
    neither = settings["fps"] is None and settings["num_frames"] is None
    if both and cls.family != GLM:
        raise ProcessorError("fps and num_frames are both set, which exclude each other: null one")
    if neither and settings["do_sample_frames"] and cls.family == QWEN:
        raise ProcessorError("do_sample_frames is true without fps or num_frames: set one, or do_sample_frames false")
    return FrameSampler(
        rule=cls.rule,
        settings=SamplingSettings(
            fps=settings["fps"],
            num_frames=settings["num_frames"],
            min_frames=settings.get("min_frames", 1),
            max_frames=settings.get("max_frames", 1),
            max_duration=settings["max_duration"] or 0.0,
            temporal_patch=temporal_patch,
        ),
        overrides=cls.follows,
        enabled=settings["do_sample_frames"],
    )


def _resize(
    settings: Mapping[str, Any], cls: VideoProcessorClass, kind: ProcessorClass, *, factor: int, temporal_patch: int
) -> ClipSize:
    if cls.family == GEMMA:
        tokens = settings["max_soft_tokens"]
        if tokens not in SOFT_TOKENS:
            raise ProcessorError(f"max_soft_tokens is {tokens!r}, must be one of {SOFT_TOKENS}")
        return EachFrame(SoftTokenResize(side=factor, max_soft_tokens=tokens))
    least, most = read_limits(settings, kind)
    if cls.whole_clip:
        rule = ClipResize(factor=factor, min_pixels=least, max_pixels=most, temporal_patch=temporal_patch)
        return WholeClip(rule, temporal_patch)
    return EachFrame(StillResize(factor=factor, min_pixels=least, max_pixels=most))


def _stamps(settings: Mapping[str, Any], directory: Path | None) -> TimeStamps:
    if directory is None:
        return TimeStamps(None)
    file = directory / str(settings["font"])
    try:
        return TimeStamps(file.read_bytes())
    except OSError as error:
        raise ProcessorError(
            f"draw_on_frames is true, and font {settings['font']!r} is no font file beside it: put the font there that "
            "the model was trained with, or set draw_on_frames false"
        ) from error
