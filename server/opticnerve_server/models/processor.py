"""Reads what an image processor of transformers is set to, and refuses by name what this server does not do.

Both backends and every generation of the file are read: `min_pixels` and `max_pixels` or `size.shortest_edge` and
`longest_edge`, with or without the settings that only repeat a default, alone or nested in a `processor_config.json`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

BILINEAR, BICUBIC = 2, 3
"""Of `PIL.Image.Resampling`, the codes that these files use."""


@dataclass(frozen=True, slots=True)
class ProcessorClass:
    """An image processor class of transformers, as its file describes it."""

    types: tuple[str, ...]
    """Values of `image_processor_type`, less endings that choose a backend; the first is the class's own name."""
    defaults: Mapping[str, object]
    """Its class defaults: what a key means that is absent or null. Other keys are not its settings."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Older names of keys of `size`; where set, they win over it."""
    resample: int = BICUBIC
    """The one filter that the family's planner resizes by."""


CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]

PLAIN: Mapping[str, object] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": BICUBIC,
    "rescale_factor": 1 / 255,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}
"""Defaults that most classes share."""

COMMON: Mapping[str, object] = {**PLAIN, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
"""Defaults that the classes of (t, h, w) grids share."""

QWEN2_VL = ProcessorClass(
    types=("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor"),  # the second is a former name of the first
    defaults={**COMMON, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}},
    overrides={"min_pixels": "shortest_edge", "max_pixels": "longest_edge"},
)
"""The class of all Qwen towers."""

INERT = {
    "auto_map", "data_format", "default_to_square", "device", "disable_grouping", "feature_extractor_type",
    "image_seq_length", "input_data_format", "processor_class", "return_tensors", "use_fast",
}  # fmt: skip
"""Keys that change neither pixels nor grid."""


class ProcessorError(ValueError):
    """The processor's settings cannot be followed. The text names the key, its value and the remedy."""


@dataclass(frozen=True, slots=True)
class ProcessorSettings:
    """What of the file a planner needs. `mean` and `std` are of values scaled to 0..1, in RGB order."""

    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def read_processor(
    processor: Mapping[str, object], kind: ProcessorClass, *, patch: int, merge: int, temporal_patch: int
) -> ProcessorSettings:
    """The settings of a processor dict of class `kind`, which must agree with the tower's `patch`, `merge` and
    `temporal_patch`.

    Raises ProcessorError.
    """
    settings = read_settings(processor, kind)
    of_tower = "it must be that of the tower in config.json"
    require(settings, "do_normalize", True, "pixels are always normalised")
    require(settings, "patch_size", patch, of_tower)
    require(settings, "merge_size", merge, of_tower)
    require(settings, "temporal_patch_size", temporal_patch, of_tower)
    min_pixels, max_pixels = read_limits(settings, kind)
    return ProcessorSettings(
        min_pixels, max_pixels, read_channels(settings, "image_mean"), read_channels(settings, "image_std")
    )


def read_settings(processor: Mapping[str, object], kind: ProcessorClass) -> dict[str, object]:
    """The settings of a processor dict over the defaults of `kind`. Raises ProcessorError for another class, for a key
    that `kind` does not have, and for what no tower here can follow: no resize, no scaling to 0..1, another filter.
    """
    nested = processor.get("image_processor")
    given: Mapping[str, object] = nested if isinstance(nested, Mapping) else processor
    settings = {"image_processor_type": kind.types[0], **kind.defaults}
    settings.update({key: value for key, value in given.items() if value is not None})
    _refuse_unknown(settings, kind)
    name = settings["image_processor_type"]
    if not isinstance(name, str) or name.removesuffix("Fast").removesuffix("Pil") not in kind.types:
        raise ProcessorError(f"image_processor_type is {name!r}, this model's is one of {sorted(kind.types)}")
    require(settings, "do_resize", True, "images are always resized to the patch grid")
    require(settings, "do_rescale", True, "pixels are always scaled to 0..1")
    require(settings, "do_convert_rgb", True, "images are always converted to RGB")
    require(settings, "resample", kind.resample, "it is the one filter that this family's images are resized by")
    factor = settings["rescale_factor"]
    if not isinstance(factor, (int, float)) or not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        raise ProcessorError(f"rescale_factor is {factor!r}, must be 1/255: pixels are always scaled to 0..1")
    return settings


def require(settings: Mapping[str, object], key: str, wanted: object, why: str) -> None:
    """Raise ProcessorError unless a setting is the one value that is followed here."""
    if settings[key] != wanted:
        raise ProcessorError(f"{key} is {settings[key]!r}, must be {wanted!r}: {why}")


def _refuse_unknown(settings: Mapping[str, object], kind: ProcessorClass) -> None:
    """A key nobody knows may change pixels; False means that something is off."""
    known = {"image_processor_type", *kind.defaults, *kind.overrides, *INERT}
    for key, value in settings.items():
        if key not in known and value is not False:
            raise ProcessorError(
                f"{key} is {value!r}, a setting that this server does not implement; remove it or null it"
            )


def read_limits(settings: Mapping[str, object], kind: ProcessorClass) -> tuple[int, int]:
    """Least and greatest number of pixels. Raises ProcessorError."""
    size = settings["size"]
    if not isinstance(size, Mapping):
        raise ProcessorError(f"size is {size!r}, must have shortest_edge and longest_edge")
    edges = {key: value for key, value in size.items() if value is not None}
    for old, new in kind.overrides.items():
        if settings.get(old) is not None:
            edges.pop(old, None)
            edges[new] = settings[old]
    if edges.keys() != {"shortest_edge", "longest_edge"}:
        raise ProcessorError(
            f"size is {dict(size)!r}, must have shortest_edge and longest_edge alone (pixels of an image)"
            + (f", or {' and '.join(kind.overrides)} beside it" if kind.overrides else "")
        )
    smallest, largest = edges["shortest_edge"], edges["longest_edge"]
    if not (type(smallest) is int and type(largest) is int and 1 <= smallest <= largest):
        raise ProcessorError(
            f"size is {dict(edges)!r}, must be whole pixel counts with 1 <= shortest_edge <= longest_edge"
        )
    return smallest, largest


def read_channels(settings: Mapping[str, object], key: str) -> tuple[float, float, float]:
    """Three numbers, in RGB order. Raises ProcessorError."""
    values = settings[key]
    if not isinstance(values, (list, tuple)) or len(values) != 3 or not all(type(v) in (int, float) for v in values):
        raise ProcessorError(f"{key} is {values!r}, must be three numbers in RGB order")
    red, green, blue = (float(value) for value in values)
    return red, green, blue
