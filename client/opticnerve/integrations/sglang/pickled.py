"""Pickles, written by hand: the few opcodes of protocol 2 that the head of a message needs.

What they mean is told by `pickletools` of the standard library. Nothing here, or elsewhere in this package, loads one:
loading runs what the sender wrote.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Global:
    """What the reader finds under this name in this module."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """What the reader gets when it calls a global with one argument."""

    function: Global
    argument: Value


@dataclass(frozen=True, slots=True)
class Instance:
    """An object that is made without its constructor and given these attributes."""

    type: Global
    attributes: Mapping[str, Value]


Value: TypeAlias = "int | float | str | Global | Call | Instance | Sequence[Value] | Mapping[str, Value] | None"


def pickled(value: Value) -> bytes:
    """The pickle of a value. Its integers have at most 255 bytes; its texts have no lone surrogates (UnicodeError)."""
    return b"\x80\x02" + _put(value) + b"."  # PROTO 2, STOP


def _put(value: Value) -> bytes:
    match value:
        case None:
            return b"N"
        case int():
            length = value.bit_length() // 8 + 1  # room for the sign
            return struct.pack("<cB", b"\x8a", length) + value.to_bytes(length, "little", signed=True)  # LONG1
        case float():
            return struct.pack(">cd", b"G", value)
        case str():
            text = value.encode()
            return struct.pack("<cI", b"X", len(text)) + text
        case Global(module, name):
            return f"c{module}\n{name}\n".encode()
        case Call(function, argument):
            return _put(function) + _put(argument) + b"\x85R"  # TUPLE1, REDUCE
        case Instance(kind, attributes):
            return _put(kind) + b")\x81" + _put(attributes) + b"b"  # EMPTY_TUPLE, NEWOBJ, state, BUILD
        case Mapping():
            return b"}(" + b"".join(_put(key) + _put(item) for key, item in value.items()) + b"u"
        case Sequence():
            return b"](" + b"".join(map(_put, value)) + b"e"
    raise TypeError(f"{type(value).__name__} is not written")
