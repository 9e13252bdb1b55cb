"""Where settings come from: flag over environment over file over default.

A setting is one dataclass field made by `setting`. Its three outside names follow from the field's: `max_queue_items`
is the flag `--max-queue-items`, the variable `OPTICNERVE_MAX_QUEUE_ITEMS` and the file key `max_queue_items`. Whatever
the source, the value arrives as text and one parser reads it, so no source is more lenient than another.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

PREFIX = "OPTICNERVE_"
CONFIG_VARIABLE = PREFIX + "CONFIG"

_SERVICE_LINK = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_.*)?$|_PORT_\d+_(TCP|UDP|SCTP)(_.*)?$")
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")

T = TypeVar("T")
V = TypeVar("V", covariant=True)


class ConfigError(ValueError):
    """A setting that cannot be used. The text names the setting, where its value came from, and the remedy."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is declared of one setting beside its name, type and default."""

    parse: Callable[[str], Any]
    group: str
    help: str
    reason: str
    metavar: str


def setting(parse: Callable[[str], Any], group: str, help: str, reason: str, metavar: str, **default: Any) -> Any:
    """A dataclass field: how its text is read, its help with the unit, and why its default is what it is."""
    return dataclasses.field(metadata={"setting": Setting(parse, group, help, reason, metavar)}, **default)


def settings_of(cls: type) -> dict[str, Setting]:
    """The settings of a dataclass, by field name, in their order."""
    return {field.name: field.metadata["setting"] for field in dataclasses.fields(cls)}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return PREFIX + name.upper()


@dataclass(frozen=True, slots=True)
class Resolved(Generic[T]):
    """An effective configuration and the origin of each value, such as `from env OPTICNERVE_LISTEN`."""

    config: T
    sources: dict[str, str]
    warnings: list[str]


def resolve(cls: type[T], flags: Mapping[str, str], environ: Mapping[str, str]) -> Resolved[T]:
    """Read every setting of `cls` from its best source.

    `flags` holds the text of the flags that were given, by field name; "config" in it, or else OPTICNERVE_CONFIG, names
    a TOML file. Raises ConfigError for a value, a file or a file key that cannot be used.
    """
    settings = settings_of(cls)
    file = flags.get("config", environ.get(CONFIG_VARIABLE))
    texts: dict[str, tuple[str, str]] = {}
    if file is not None:
        texts.update({name: (text, f"from file {file}") for name, text in _read_file(Path(file), settings).items()})
    texts.update(
        {
            name: (environ[variable(name)], f"from env {variable(name)}")
            for name in settings
            if variable(name) in environ
        }
    )
    texts.update({name: (flags[name], f"from flag {flag(name)}") for name in settings if name in flags})
    values = {}
    for name, (text, source) in texts.items():
        try:
            values[name] = settings[name].parse(text)
        except ValueError as error:
            raise ConfigError(f"{name} = {text!r} ({source}): {error}") from None
    _require(cls, values)
    sources = {name: texts[name][1] if name in texts else f"default: {settings[name].reason}" for name in settings}
    return Resolved(cls(**values), sources, list(_unknown_variables(settings, environ)))


def _require(cls: type, values: Mapping[str, Any]) -> None:
    for field in dataclasses.fields(cls):
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and field.name not in values:
            name = field.name
            raise ConfigError(f"{name} is not set: give {flag(name)}, {variable(name)} or the file key {name}")


def _read_file(path: Path, settings: Mapping[str, Setting]) -> dict[str, str]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} is not TOML: {error}") from None
    for key in content:
        if key not in settings:
            raise ConfigError(f"unknown key {key!r} in {path}{nearest(key, settings)}")
    return {key: _as_text(path, key, value) for key, value in content.items()}


def _as_text(path: Path, key: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list) and all(isinstance(entry, str | int) for entry in value):
        return ",".join(str(entry) for entry in value)
    raise ConfigError(f"{key} in {path} is a {type(value).__name__}: write a string, a number, true, false or a list")


def _unknown_variables(settings: Iterable[str], environ: Mapping[str, str]) -> Iterable[str]:
    known = {variable(name) for name in settings} | {CONFIG_VARIABLE}
    for name, value in environ.items():
        if not name.startswith(PREFIX) or name in known:
            continue
        # Kubernetes gives every pod variables for the Services of its namespace; one may well be called opticnerve.
        if _SERVICE_LINK.search(name) or (name.endswith("_PORT") and _LINK_VALUE.match(value)):
            continue
        yield f"unknown variable {name}{nearest(name, known, PREFIX)}"


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a sentence about an unknown name: which known one is meant, if any comes near behind the prefix."""
    candidates = [other.removeprefix(prefix) for other in known]
    match = difflib.get_close_matches(name.removeprefix(prefix), candidates, n=1)
    return f": did you mean {prefix}{match[0]}?" if match else ""


def parse_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line; an unknown argument is answered with the nearest flag and exit code 2.

    A sub-command sets the default `parser` to its own parser, whose flags are then searched.
    """
    known, extra = parser.parse_known_args(arguments)
    if extra:
        used: argparse.ArgumentParser = getattr(known, "parser", parser)
        name = extra[0].split("=")[0]
        used.error(f"unknown argument {name}{nearest(name, used._option_string_actions, '--')}")
    return known


def add_flags(parser: argparse.ArgumentParser, cls: type) -> None:
    """One flag a setting, in groups. Flags that are not given leave nothing in the namespace."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in dataclasses.fields(cls):
        declared: Setting = field.metadata["setting"]
        if declared.group not in groups:
            groups[declared.group] = parser.add_argument_group(declared.group)
        help = f"{declared.help} Default {_shown(field)}: {declared.reason}".replace("%", "%%")
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": help}
        if declared.parse is boolean:
            groups[declared.group].add_argument(flag(field.name), action="store_const", const="true", **options)
            options["help"] = argparse.SUPPRESS
            groups[declared.group].add_argument(
                flag(f"no_{field.name}"), action="store_const", const="false", **options
            )
        else:
            groups[declared.group].add_argument(flag(field.name), metavar=declared.metavar, **options)


def _shown(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return str(field.default_factory())
    if field.default is dataclasses.MISSING:
        return "none"
    return text(field.default)


def text(value: object) -> str:
    """A value as a user would write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "none" if value is None else str(value) or '""'


# --- parsers: text in, value out, ValueError with the remedy


@dataclass(frozen=True, slots=True)
class Parser(Generic[V]):
    """A parser that knows the JSON schema of what a file may have for it."""

    read: Callable[[str], V]
    schema: Mapping[str, object]

    def __call__(self, text: str) -> V:
        return self.read(text)


def json_schema(parse: Callable[[str], Any]) -> dict[str, object]:
    """The JSON schema of what a file may have for a parser: at least its type. Of a mere function it is a string."""
    return dict(parse.schema) if isinstance(parse, Parser) else {"type": "string"}


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("write true or false")
    return text == "true"


boolean = Parser(_boolean, {"type": "boolean"})


def integer(low: int, high: int | None = None) -> Parser[int]:
    """Whole numbers from `low` to `high`, underscores allowed."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("write a whole number") from None
        if value < low:
            raise ValueError(f"must be at least {low}")
        if high is not None and value > high:
            raise ValueError(f"must be at most {high}")
        return value

    bounds = {"minimum": low} if high is None else {"minimum": low, "maximum": high}
    return Parser(parse, {"type": "integer", **bounds})


def or_word(word: str, meaning: Any, parse: Callable[[str], Any]) -> Parser[Any]:
    """What `parse` reads, or a word that stands for `meaning`."""

    def parse_or_word(text: str) -> Any:
        if text == word:
            return meaning
        try:
            return parse(text)
        except ValueError as error:
            raise ValueError(f"{error}, or {word}") from None

    schema = json_schema(parse)
    alternatives = schema.get("anyOf", [schema])
    assert isinstance(alternatives, list)
    return Parser(parse_or_word, {"anyOf": [*alternatives, {"const": word}]})


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("write a number of seconds") from None
    if not 0 <= value < float("inf"):
        raise ValueError("must be 0 or more seconds, and finite")
    return value


seconds = Parser(_seconds, {"type": "number", "minimum": 0})


def _positive_seconds(text: str) -> float:
    if not (value := seconds(text)):
        raise ValueError("must be over 0 seconds")
    return value


positive_seconds = Parser(_positive_seconds, {"type": "number", "exclusiveMinimum": 0})


def choice(*words: str) -> Parser[str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"write one of {', '.join(words)}{nearest(text, words)}")
        return text

    return Parser(parse, {"enum": list(words)})


def address(text: str) -> str:
    """`host:port`, port 0 for any free one; IPv6 hosts in brackets."""
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or (":" in bare and host == bare):
        raise ValueError("write host:port, an IPv6 host in brackets")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError("the port is a number from 0 to 65535")
    return text
