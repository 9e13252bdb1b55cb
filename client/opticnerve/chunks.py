"""The messages that carry rows, written and read by hand.

Generated code makes three copies of a message's megabyte more than gRPC's own: these functions make one when it is
written and none when it is read. To everybody else the bytes are those of any EncodeResponse.
"""

from __future__ import annotations

from typing import NamedTuple

from opticnerve.v1 import encoder_pb2 as pb

_VARINT, _BYTES = 0, 2  # wire types

_INDEX = pb.EncodeResponse.ITEM_INDEX_FIELD_NUMBER << 3 | _VARINT
_CHUNK = pb.EncodeResponse.CHUNK_FIELD_NUMBER << 3 | _BYTES
_OFFSET = pb.TensorChunk.OFFSET_FIELD_NUMBER << 3 | _VARINT
_DATA = pb.TensorChunk.DATA_FIELD_NUMBER << 3 | _BYTES


class RowChunk(NamedTuple):
    """An EncodeResponse whose event is a TensorChunk. `data` is a view of the message that it came in."""

    item_index: int
    offset: int
    data: memoryview


def pack(item_index: int, offset: int, data: memoryview) -> bytes:
    """The serialised message of these rows, `data` contiguous bytes, which are copied once."""
    inner = _field(_OFFSET, offset) + _field(_DATA, len(data))
    outer = _field(_INDEX, item_index) + _field(_CHUNK, len(inner) + len(data))
    return b"".join((outer, inner, data))


def unpack(message: bytes) -> RowChunk | pb.EncodeResponse:
    """The message of a server: rows as views of `message`, anything else parsed. Raises DecodeError."""
    rows = _rows_of(message)
    if rows is not None:
        return rows
    parsed = pb.EncodeResponse.FromString(message)
    if parsed.WhichOneof("event") != "chunk":
        return parsed
    return RowChunk(parsed.item_index, parsed.chunk.offset, memoryview(parsed.chunk.data))


def _rows_of(message: bytes) -> RowChunk | None:
    """The rows of a message whose fields are those of `pack`, in its order, of which zeros may be left out."""
    try:
        index, at = _optional(message, 0, _INDEX)
        size, at = _required(message, at, _CHUNK)
        if at + size != len(message) or index >= 1 << 32:
            return None
        offset, at = _optional(message, at, _OFFSET)
        size, at = _required(message, at, _DATA)
    except (IndexError, ValueError):
        return None
    return RowChunk(index, offset, memoryview(message)[at:]) if at + size == len(message) else None


def _field(tag: int, number: int) -> bytes:
    """A tag and a varint: the value of a number, the length of bytes. All tags here are below 128."""
    encoded = bytearray([tag])
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _optional(message: bytes, at: int, tag: int) -> tuple[int, int]:
    return _required(message, at, tag) if message[at] == tag else (0, at)


def _required(message: bytes, at: int, tag: int) -> tuple[int, int]:
    """The number behind a tag at `at`, and where what follows begins. Raises ValueError, IndexError."""
    if message[at] != tag:
        raise ValueError(f"the field at {at} is another one")
    number, shift = 0, 0
    while True:
        at += 1
        number |= (message[at] & 0x7F) << shift
        if number >= 1 << 64 or shift > 63:
            raise ValueError("the number has more bits than a varint")
        if message[at] < 0x80:
            return number, at + 1
        shift += 7
