"""Reads what an image processor of transformers is set to, and refuses by name what this server does not do.

Both backends and every generation of the file are read: `min_pixels` and `max_pixels` or `size.shortest_edge` and
`longest_edge`, with or without the settings that only repeat a default, alone or nested in a `processor_config.json`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

BICUBIC = 3
"""`PIL.Image.Resampling.BICUBIC`, the code that these files use."""

TYPES = {"Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor"}
"""Values of `image_processor_type`, less endings that choose a backend; the second is a former name of the first."""

DEFAULTS: Mapping[str, object] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": BICUBIC,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
"""Class defaults of transformers' Qwen2VLImageProcessor: what a key means that is absent or null."""

OVERRIDES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Older names of the two limits; where set, they win over `size`."""

INERT = {
    "auto_map", "data_format", "default_to_square", "device", "disable_grouping", "feature_extractor_type",
    "input_data_format", "processor_class", "return_tensors", "use_fast",
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
    processor: Mapping[str, object], *, patch: int, merge: int, temporal_patch: int
) -> ProcessorSettings:
    """The settings of a processor dict, which must agree with the tower's `patch`, `merge` and `temporal_patch`.

    Raises ProcessorError.
    """
    nested = processor.get("image_processor")
    given: Mapping[str, object] = nested if isinstance(nested, Mapping) else processor
    settings = {**DEFAULTS, **{key: value for key, value in given.items() if value is not None}}
    _refuse_unknown(settings)
    kind = settings["image_processor_type"]
    if not isinstance(kind, str) or kind.removesuffix("Fast").removesuffix("Pil") not in TYPES:
        raise ProcessorError(f"image_processor_type is {kind!r}, this model's is one of {sorted(TYPES)}")
    for key, wanted, why in (
        ("do_resize", True, "images are always resized to the patch grid"),
        ("do_rescale", True, "pixels are always scaled to 0..1"),
        ("do_normalize", True, "pixels are always normalised"),
        ("do_convert_rgb", True, "images are always converted to RGB"),
        ("resample", BICUBIC, "the resize is bicubic"),
        ("patch_size", patch, "it must be that of the tower in config.json"),
        ("merge_size", merge, "it must be that of the tower in config.json"),
        ("temporal_patch_size", temporal_patch, "it must be that of the tower in config.json"),
    ):
        if settings[key] != wanted:
            raise ProcessorError(f"{key} is {settings[key]!r}, must be {wanted!r}: {why}")
    factor = settings["rescale_factor"]
    if not isinstance(factor, (int, float)) or not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        raise ProcessorError(f"rescale_factor is {factor!r}, must be 1/255: pixels are always scaled to 0..1")
    min_pixels, max_pixels = _limits(settings)
    return ProcessorSettings(
        min_pixels, max_pixels, _channels(settings, "image_mean"), _channels(settings, "image_std")
    )


def _refuse_unknown(settings: Mapping[str, object]) -> None:
    """A key nobody knows may change pixels; False means that something is off."""
    for key, value in settings.items():
        if key not in DEFAULTS and key not in OVERRIDES and key not in INERT and value is not False:
            raise ProcessorError(
                f"{key} is {value!r}, a setting that this server does not implement; remove it or null it"
            )


def _limits(settings: Mapping[str, object]) -> tuple[int, int]:
    size = settings["size"]
    if not isinstance(size, Mapping):
        raise ProcessorError(f"size is {size!r}, must have shortest_edge and longest_edge")
    edges = {key: value for key, value in size.items() if value is not None}
    for old, new in OVERRIDES.items():
        if settings.get(old) is not None:
            edges.pop(old, None)
            edges[new] = settings[old]
    if edges.keys() != {"shortest_edge", "longest_edge"}:
        raise ProcessorError(
            f"size is {dict(size)!r}, must have shortest_edge and longest_edge alone (pixels of an image), "
            "or min_pixels and max_pixels beside it"
        )
    smallest, largest = edges["shortest_edge"], edges["longest_edge"]
    if not (type(smallest) is int and type(largest) is int and 1 <= smallest <= largest):
        raise ProcessorError(
            f"size is {dict(edges)!r}, must be whole pixel counts with 1 <= shortest_edge <= longest_edge"
        )
    return smallest, largest


def _channels(settings: Mapping[str, object], key: str) -> tuple[float, float, float]:
    values = settings[key]
    if not isinstance(values, (list, tuple)) or len(values) != 3 or not all(type(v) in (int, float) for v in values):
        raise ProcessorError(f"{key} is {values!r}, must be three numbers in RGB order")
    red, green, blue = (float(value) for value in values)
    return red, green, blue
