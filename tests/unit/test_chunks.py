"""Messages of rows by hand, against generated code."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from opticnerve.chunks import RowChunk, pack, unpack
from opticnerve.v1 import encoder_pb2 as pb

INDICES = st.integers(0, 2**32 - 1)
OFFSETS = st.integers(0, 2**64 - 1)


@given(INDICES, OFFSETS, st.binary(max_size=300))
def test_others_read_what_is_packed(index: int, offset: int, data: bytes) -> None:
    read = pb.EncodeResponse.FromString(pack(index, offset, memoryview(data)))
    assert read == pb.EncodeResponse(item_index=index, chunk=pb.TensorChunk(offset=offset, data=data))


@given(INDICES, OFFSETS, st.binary(max_size=300))
def test_what_others_wrote_is_read(index: int, offset: int, data: bytes) -> None:
    message = pb.EncodeResponse(item_index=index, chunk=pb.TensorChunk(offset=offset, data=data))
    assert unpack(message.SerializeToString()) == RowChunk(index, offset, memoryview(data))
    assert unpack(pack(index, offset, memoryview(data))) == RowChunk(index, offset, memoryview(data))


def test_rows_are_a_view_of_the_message() -> None:
    message = pack(7, 1 << 40, memoryview(bytes(range(200)) * 100))
    rows = unpack(message)
    assert isinstance(rows, RowChunk)
    assert rows.data.obj is message


@pytest.mark.parametrize(
    "message",
    [
        pb.EncodeResponse(item_index=3),
        pb.EncodeResponse(item_index=3, started=pb.ItemStarted(digest=bytes(32))),
        pb.EncodeResponse(finished=pb.ItemFinished(crc32=1)),
        pb.EncodeResponse(),
    ],
)
def test_other_messages_are_parsed(message: pb.EncodeResponse) -> None:
    assert unpack(message.SerializeToString()) == message


@given(INDICES, st.binary(min_size=1, max_size=40), st.binary(max_size=8))
def test_fields_in_another_order_or_unknown_ones_are_read_all_the_same(index: int, data: bytes, more: bytes) -> None:
    """The order of fields is a writer's choice, and newer servers may send more of them."""
    chunk = b"\x12" + bytes([len(data)]) + data + b"\x08\x05"  # data, offset
    message = b"\x1a" + bytes([len(chunk)]) + chunk + pb.EncodeResponse(item_index=index).SerializeToString()
    message += b"\x7a" + bytes([len(more)]) + more  # field 15
    assert unpack(message) == RowChunk(index, 5, memoryview(data))


@given(st.binary(max_size=60))
@example(b"\x08\xff\xff\xff\xff\x7f\x1a\x05\x08\x01\x12\x01z")  # an index of 35 bits
@example(b"\x08\x01\x1a\x0e\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x12\x01z")  # an offset of 70
@example(b"\x08\x01\x1a\x11\x08\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x00\x12\x01z")  # a longer 0
def test_any_bytes_are_read_as_generated_code_reads_them(message: bytes) -> None:
    try:
        expected = pb.EncodeResponse.FromString(message)
    except DecodeError:
        with pytest.raises(DecodeError):
            unpack(message)
        return
    read = unpack(message)
    if expected.WhichOneof("event") == "chunk":
        assert read == RowChunk(expected.item_index, expected.chunk.offset, memoryview(expected.chunk.data))
    else:
        assert read == expected


@given(st.integers(0, 300), st.integers(0, 40), st.integers(0, 255))
def test_a_broken_byte_is_read_as_generated_code_reads_it(offset: int, at: int, byte: int) -> None:
    message = bytearray(pack(2, offset, memoryview(b"rows of an item")))
    message[at % len(message)] = byte
    test_any_bytes_are_read_as_generated_code_reads_them.hypothesis.inner_test(bytes(message))  # type: ignore[attr-defined]
