"""Size and orientation of an image file from its first bytes, before anything is decoded.

Reads no more than it must, so a caller can plan from a prefix of the file, and refuses what would make a decoder
allocate or loop out of proportion to the file.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAX_SEGMENTS = 1 << 12
"""Chunks, segments or blocks that may precede the pixels. Files have tens; each costs a microsecond here and
several in Pillow, and the smallest takes four bytes of a request."""

MAX_FILL_BYTES = 1 << 16
"""Bytes without meaning before a marker of a JPEG file: skipped here at once, but by Pillow one by one."""

MAX_TIFF_STRIPS = 1 << 18
"""Strips or tiles of a TIFF file: Pillow keeps some 300 bytes for each."""

MAX_TIFF_TILE_PIXELS = 1 << 24
"""Pixels of one tile of a TIFF file, whose memory is taken whatever the size of the image."""

NEED_STEP = 4096
"""`need_bytes` is a multiple of this, so that a header of many small segments does not take a question for each."""


class MediaError(ValueError):
    """These bytes cannot be taken. The text is short, says why and what helps, and holds nothing of the bytes."""


class NeedMoreData(MediaError):
    """The header goes on behind the given bytes: `need_bytes` from the start of the file tell more.

    For one who has the whole file: it is truncated.
    """

    def __init__(self, need_bytes: int) -> None:
        super().__init__("the image file ends within its header: send the whole file")
        self.need_bytes = need_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """What the first bytes say. `height` and `width` are those seen after `orientation`, 1 to 8, was applied."""

    format: str
    height: int
    width: int
    orientation: int


def read_size(data: bytes, *, max_pixels: int) -> tuple[int, int]:
    """(height, width) of an image file, given whole or the start of it; see `read_header`."""
    header = read_header(data, max_pixels=max_pixels)
    return header.height, header.width


def read_header(data: bytes, *, max_pixels: int) -> Header:
    """The header of an image file, given whole or the start of it.

    Raises NeedMoreData when `data` is too short to know, MediaError when the file is of no known format, damaged, empty
    or larger than `max_pixels`.
    """
    _need(data, 12)
    for name, (magics, parse) in _FORMATS.items():
        if data.startswith(magics) and (name != "WebP" or data[8:12] == b"WEBP"):
            stored_height, stored_width, orientation = parse(data)
            break
    else:
        raise MediaError(f"the file is of none of the known formats: send one of {', '.join(_FORMATS)}")
    height, width = (stored_width, stored_height) if orientation > 4 else (stored_height, stored_width)
    if height < 1 or width < 1:
        raise MediaError(
            f"the {name} file says that it has no pixels ({height} x {width}): send an image that has some"
        )
    if height * width > max_pixels:
        raise MediaError(
            f"the image has {height} x {width} pixels, the limit is {max_pixels} in all (max_image_pixels): "
            "send a smaller one"
        )
    return Header(name, height, width, orientation)


def _need(data: bytes, end: int) -> None:
    if len(data) < end:
        raise NeedMoreData(-(-end // NEED_STEP) * NEED_STEP)


def _damaged(name: str) -> MediaError:
    return MediaError(f"the header of the {name} file is damaged or out of the ordinary: save the image anew")


# --- one parser a format: the whole file or the start of it -> stored height, stored width, orientation


_SKIPPED = b"\x00\x01\xd0\xd1\xd2\xd3\xd4\xd5\xd6\xd7\xd8\xff"
"""Behind an FF: no marker, a fill byte, or a marker that stands alone."""

_JPEG_SEGMENT = re.compile(rb"\xff[^" + _SKIPPED + rb"]")


def _jpeg(data: bytes) -> tuple[int, int, int]:
    position, exif = 2, bytearray()
    for _ in range(MAX_SEGMENTS):
        _need(data, position + 4)
        marker, length = data[position + 1], int.from_bytes(data[position + 2 : position + 4], "big")
        if data[position] != 0xFF or marker in _SKIPPED:
            position = _next_segment(data, position)
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # frame header
            _need(data, position + 9)
            height, width = struct.unpack_from(">HH", data, position + 5)
            return height, width, _exif_orientation(bytes(exif))
        elif marker in (0xD9, 0xDA) or length < 2:  # end of image, start of scan
            break
        else:
            end = position + 2 + length
            if marker == 0xE1:
                _need(data, end)
                if data[position + 4 : position + 10] == b"Exif\0\0":
                    exif += data[position + 10 : end]  # several are one block, of which this is the next part
            position = end
    raise _damaged("JPEG")


def _next_segment(data: bytes, position: int) -> int:
    """Where the first segment at or behind `position` starts, behind junk, fill bytes and markers that stand alone."""
    end = position + MAX_FILL_BYTES + 2
    found = _JPEG_SEGMENT.search(data, position, end)
    if found is None:
        _need(data, min(len(data) + 1, end))
        raise _damaged("JPEG")
    return found.start()


def _png(data: bytes) -> tuple[int, int, int]:
    _need(data, 33)
    if data[12:16] != b"IHDR":
        raise _damaged("PNG")
    width, height = struct.unpack_from(">II", data, 16)
    position = 33
    for _ in range(MAX_SEGMENTS):
        _need(data, position + 8)
        length, kind = struct.unpack_from(">I4s", data, position)
        if kind in (b"IDAT", b"IEND"):
            return height, width, 1
        if kind == b"eXIf":
            _need(data, position + 8 + length)
            return height, width, _exif_orientation(data[position + 8 : position + 8 + length])
        position += 12 + length
    raise _damaged("PNG")


def _webp(data: bytes) -> tuple[int, int, int]:
    _need(data, 30)
    kind = data[12:16]
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return height & 0x3FFF, width & 0x3FFF, 1
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1, 1
    if kind != b"VP8X":
        raise _damaged("WebP")
    width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
    has_exif = data[20] & 0x08
    return height, width, _webp_orientation(data) if has_exif else 1


def _webp_orientation(data: bytes) -> int:
    """The EXIF chunk comes after the pixels: the file is needed to its end."""
    end = 8 + int.from_bytes(data[4:8], "little")
    _need(data, end)
    position = 12
    for _ in range(MAX_SEGMENTS):
        if position + 8 > end:
            return 1
        kind, length = struct.unpack_from("<4sI", data, position)
        if kind == b"EXIF":
            return _exif_orientation(data[position + 8 : position + 8 + length])
        position += 8 + length + length % 2
    raise _damaged("WebP")


def _gif(data: bytes) -> tuple[int, int, int]:
    """The canvas, grown to hold the first frame."""
    _need(data, 13)
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    in_extension = False
    for _ in range(MAX_SEGMENTS):
        _need(data, position + 2)
        first = data[position]
        if in_extension:  # a block of `first` bytes; the empty one is the last
            in_extension, position = first > 0, position + 1 + first
        elif first == 0x21:
            in_extension, position = True, position + 2
        elif first == 0x2C:
            _need(data, position + 9)
            left, top, frame_width, frame_height = struct.unpack_from("<HHHH", data, position + 1)
            return max(height, top + frame_height), max(width, left + frame_width), 1
        elif first == 0x3B:
            break
        else:
            position += 1
    raise _damaged("GIF")


def _bmp(data: bytes) -> tuple[int, int, int]:
    _need(data, 26)
    if int.from_bytes(data[14:18], "little") == 12:
        width, height = struct.unpack_from("<HH", data, 18)
    else:
        width, height = struct.unpack_from("<ii", data, 18)
    return abs(height), width, 1  # a negative height means that rows come from the top


_TIFF_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
_WIDTH, _LENGTH, _STRIP_OFFSETS, _ORIENTATION = 256, 257, 273, 274
_TILE_WIDTH, _TILE_LENGTH, _TILE_OFFSETS = 322, 323, 324


def _tiff(data: bytes) -> tuple[int, int, int]:
    order = _byte_order(data)
    if order is None:
        raise MediaError("the file is a BigTIFF: save it as a plain TIFF")
    (start,) = struct.unpack_from(order + "I", data, 4)
    _need(data, start + 2)
    (entries,) = struct.unpack_from(order + "H", data, start)
    _need(data, start + 2 + 12 * entries)
    tags: dict[int, int] = {}
    claimed = 0
    for tag, kind, count, value in _directory(data, order, start):
        tags[tag] = value
        claimed += _TIFF_TYPE_BYTES.get(kind, 0) * count
        if tag in (_STRIP_OFFSETS, _TILE_OFFSETS) and count > MAX_TIFF_STRIPS:
            raise MediaError(f"the TIFF file has {count} strips or tiles, at most {MAX_TIFF_STRIPS}: save it in fewer")
    _need(data, claimed)  # values that share bytes would make more of the file than it has
    tile = tags.get(_TILE_WIDTH, 0) * tags.get(_TILE_LENGTH, 0)
    if tile > MAX_TIFF_TILE_PIXELS:
        raise MediaError(f"the TIFF file has tiles of {tile} pixels, at most {MAX_TIFF_TILE_PIXELS}: save it in strips")
    orientation = tags.get(_ORIENTATION, 1)
    return tags.get(_LENGTH, 0), tags.get(_WIDTH, 0), orientation if 1 <= orientation <= 8 else 1


def _exif_orientation(exif: bytes) -> int:
    """Orientation in an Exif block, which is a small TIFF file; 1 whatever is wrong with it."""
    exif = exif.removeprefix(b"Exif\0\0")
    order = _byte_order(exif)
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(order + "I", exif, 4)
        found = (value for tag, _, _, value in _directory(exif, order, start) if tag == _ORIENTATION)
        orientation = next(found, 1)
    except struct.error:  # shorter than it says: never a reason to refuse the image
        return 1
    return orientation if 1 <= orientation <= 8 else 1


def _byte_order(data: bytes) -> str | None:
    return {b"II*\0": "<", b"MM\0*": ">"}.get(data[:4])


def _directory(data: bytes, order: str, start: int) -> Iterator[tuple[int, int, int, int]]:
    """(tag, type, count, value) of the entries at `start`; a value that lies elsewhere is its offset."""
    (entries,) = struct.unpack_from(order + "H", data, start)
    for at in range(start + 2, start + 2 + 12 * entries, 12):
        tag, kind, count = struct.unpack_from(order + "HHI", data, at)
        is_short = kind == 3 and count == 1
        (value,) = struct.unpack_from(order + ("H" if is_short else "I"), data, at + 8)
        yield tag, kind, count, value


_FORMATS = {
    "JPEG": ((b"\xff\xd8\xff",), _jpeg),
    "PNG": ((b"\x89PNG\r\n\x1a\n",), _png),
    "WebP": ((b"RIFF",), _webp),
    "GIF": ((b"GIF87a", b"GIF89a"), _gif),
    "BMP": ((b"BM",), _bmp),
    "TIFF": ((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), _tiff),
}
