"""Reading `config.json`: each family declares a dataclass with transformers' class defaults, this fills it."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

ALIASES = {"in_chans": "in_channels"}
"""Names that older files use."""

ROPE_TYPES = ("axial", "default")
"""Names of the one rotary embedding of these towers; the second is what older files call it."""


class ModelError(ValueError):
    """Something is wrong with the model's files. The text names it, and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridConfig:
    """What `vision_config` says of every (t, h, w) tower. Subclasses add their own keys and override the defaults."""

    KEYS: ClassVar[Mapping[str, str]] = {}
    """Keys of the file by the fields here, for a family that has other names; "text_config.KEY" is the language model's
    section, or the whole file where that has none."""

    depth: int
    hidden_size: int
    num_heads: int
    out_hidden_size: int
    hidden_act: str
    patch_size: int
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    in_channels: int = 3
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def merged_size(self) -> int:
        """Width of the patches of one token, side by side."""
        return self.hidden_size * self.spatial_merge_size**2

    @property
    def deepstack_levels(self) -> int:
        """Outputs of a token beside the main one."""
        return 0

    @classmethod
    def key(cls, field: str) -> str:
        """How the file calls a field: its section and its key there."""
        key = cls.KEYS.get(field, field)
        return key if "." in key else f"vision_config.{key}"

    def check(self) -> None:
        """Raise ModelError for numbers that no tower of the family can have."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise ModelError(f"{self.key(field.name)} is {value}, must be at least 1")
        if self.in_channels != 3:
            raise ModelError(f"{self.key('in_channels')} is {self.in_channels}, only RGB (3) is supported")
        self.check_heads()

    def check_heads(self) -> None:
        """Raise ModelError for heads that the rotary embedding cannot turn."""
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            raise ModelError(
                f"{self.key('hidden_size')} {self.hidden_size} over num_heads {self.num_heads} must be a multiple of "
                "4: row and column each turn a quarter of a head's pairs"
            )

    def check_activation(self, supported: str) -> None:
        """Raise ModelError for another activation than the family's."""
        if self.hidden_act != supported:
            raise ModelError(f"{self.key('hidden_act')} is {self.hidden_act!r}, this family's is {supported!r}")


Config = TypeVar("Config", bound=GridConfig)


def read_grid_config(cls: type[Config], config: Mapping[str, Any]) -> Config:
    """`cls` from the `vision_config` of a parsed config.json; keys that `cls` does not have are ignored.

    Raises ModelError for a missing section, a value of the wrong type, and what `check` refuses.
    """
    try:
        return _read(cls, config)
    except ModelError as error:
        raise ModelError(f"config.json: {error}; take the one that was published with the model's weights") from error


def _read(cls: type[Config], config: Mapping[str, Any]) -> Config:
    section = config.get("vision_config")
    if not isinstance(section, Mapping):
        raise ModelError("there is no vision_config, so this is no vision-language model's")
    given = {ALIASES.get(key, key): value for key, value in section.items() if value is not None}
    rope = given.get("rope_parameters", {})
    if rope.get("rope_type", "axial") not in ROPE_TYPES:
        raise ModelError(f"vision_config.rope_parameters.rope_type is {rope['rope_type']!r}, only 'axial' is supported")
    if "rope_theta" in rope:
        given["rope_theta"] = rope["rope_theta"]
    sections = {"vision_config": given, "text_config": config.get("text_config") or config}
    expected = typing.get_type_hints(cls)
    values = {}
    for field in dataclasses.fields(cls):
        section, _, key = cls.key(field.name).partition(".")
        if sections[section].get(key) is not None:
            values[field.name] = _typed(cls.key(field.name), sections[section][key], expected[field.name])
    missing = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING and f.name not in values]
    if missing:
        raise ModelError(f"there is no {cls.key(missing[0])}")
    parsed = cls(**values)
    parsed.check()
    return parsed


def _typed(key: str, value: Any, expected: Any) -> Any:
    """`value` as `expected`: int, float, bool, str or tuple[int, ...]."""
    if isinstance(expected, types.GenericAlias):
        if isinstance(value, list) and all(type(element) is int for element in value):
            return tuple(value)
    elif expected is float and type(value) in (int, float):
        return float(value)
    elif type(value) is expected:
        return value
    raise ModelError(f"{key} is {value!r}, must be {getattr(expected, '__name__', expected)}")
