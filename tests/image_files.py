"""Image files made byte by byte, so that what a decoder says of them can be compared with what was put in."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from opticnerve_server.media.decode import MediaError, decode, read_size

Pixels = npt.NDArray[np.uint8]

MAX_PIXELS = 1 << 20
WHITE = "#ffffff"

SHORT, LONG = 3, 4


def png(
    width: int,
    height: int,
    depth: int,
    color: int,
    rows: Sequence[bytes],
    before: Sequence[tuple[bytes, bytes]] = (),
    after: Sequence[tuple[bytes, bytes]] = (),
) -> bytes:
    """A PNG of the packed `rows`; `before` and `after` are chunks on either side of the pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))]
    chunks += [*before, (b"IDAT", pixels), *after, (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)


def tiff(
    width: int,
    height: int,
    pixels: bytes,
    *,
    order: str = "<",
    bits: Sequence[int] = (8,),
    photometric: int = 1,
    tags: dict[int, tuple[int, Sequence[int]]] | None = None,
) -> bytes:
    """A TIFF of one uncompressed strip, first the pixels and then the directory; `tags` are {tag: (type, values)}."""
    entries: dict[int, tuple[int, Sequence[int]]] = {
        256: (LONG, [width]),
        257: (LONG, [height]),
        258: (SHORT, list(bits)),
        259: (SHORT, [1]),
        262: (SHORT, [photometric]),
        273: (LONG, [8]),
        277: (SHORT, [len(bits)]),
        278: (LONG, [height]),
        279: (LONG, [len(pixels)]),
        **(tags or {}),
    }
    start = 8 + len(pixels)
    behind = start + 2 + 12 * len(entries) + 4
    directory, values = struct.pack(order + "H", len(entries)), b""
    for tag, (kind, numbers) in sorted(entries.items()):
        packed = struct.pack(order + f"{len(numbers)}{'H' if kind == SHORT else 'I'}", *numbers)
        if len(packed) > 4:
            inline = struct.pack(order + "I", behind + len(values))
            values += packed
        else:
            inline = packed.ljust(4, b"\0")
        directory += struct.pack(order + "HHI", tag, kind, len(numbers)) + inline
    magic = b"II*\0" if order == "<" else b"MM\0*"
    return magic + struct.pack(order + "I", start) + pixels + directory + bytes(4) + values


def exif(orientation: int, order: str = "<") -> bytes:
    """An Exif block with nothing but an orientation."""
    magic = b"II*\0" if order == "<" else b"MM\0*"
    entry = struct.pack(order + "HHIHH", 274, SHORT, 1, orientation, 0)
    return magic + struct.pack(order + "IH", 8, 1) + entry + bytes(4)


def jpeg_with_exif(jpeg: bytes, block: bytes) -> bytes:
    """`jpeg` with an Exif segment behind its first marker."""
    body = b"Exif\0\0" + block
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + jpeg[2:]


def rgb_array(height: int = 5, width: int = 7, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decoded(data: bytes, background: str = WHITE) -> Pixels:
    pixels = decode(data, max_pixels=MAX_PIXELS, background=background)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.shape == (*read_size(data, max_pixels=MAX_PIXELS), 3)
    return pixels


def refusal(data: bytes) -> str:
    with pytest.raises(MediaError) as caught:
        decode(data, max_pixels=MAX_PIXELS, background=WHITE)
    text = str(caught.value)
    assert 0 < len(text) < 1024
    assert text.isascii()
    for leak in ("PIL", "<", "Error", "object", "/", "\\x", "b'"):
        assert leak not in text
    return text


def oriented(kind: str, pixels: Pixels, orientation: int, order: str = "<") -> bytes:
    height, width, _ = pixels.shape
    if kind == "PNG":
        return png(width, height, 8, 2, [row.tobytes() for row in pixels], before=[(b"eXIf", exif(orientation, order))])
    if kind == "TIFF":
        tags = {274: (SHORT, [orientation])}
        return tiff(width, height, pixels.tobytes(), order=order, bits=(8, 8, 8), photometric=2, tags=tags)
    if kind == "WEBP":
        return encoded(Image.fromarray(pixels), "WEBP", lossless=True, exif=exif(orientation, order))
    file = encoded(Image.fromarray(pixels), "JPEG", quality=100, subsampling=0)
    return jpeg_with_exif(file, exif(orientation, order))


def samples() -> dict[str, bytes]:
    """A small file of each format and of each way to store its size."""
    image = Image.fromarray(rgb_array(24, 40))
    files = {
        "jpeg": encoded(image, "JPEG"),
        "jpeg with exif": jpeg_with_exif(encoded(image, "JPEG", progressive=True, comment=bytes(9000)), exif(6)),
        "png": encoded(image, "PNG"),
        "png with exif": png(2, 3, 8, 2, [bytes(6)] * 3, before=[(b"iCCP", bytes(5000)), (b"eXIf", exif(8))]),
        "webp lossy": encoded(image, "WEBP"),
        "webp lossless": encoded(image, "WEBP", lossless=True),
        "webp with exif": encoded(image, "WEBP", exif=exif(6)),
        "gif": encoded(image.quantize(8), "GIF", comment=b"x" * 3000),
        "bmp": encoded(image, "BMP"),
        "tiff": encoded(image, "TIFF"),
        "tiff directory last": oriented("TIFF", rgb_array(24, 40), 5),
    }
    files["bmp from the top"] = files["bmp"][:22] + struct.pack("<i", -24) + files["bmp"][26:]
    files["bmp of os/2"] = b"BM" + bytes(8) + struct.pack("<IIHHHH", 26, 12, 40, 24, 1, 24) + bytes(40 * 24 * 3)
    return files


SAMPLES = samples()
