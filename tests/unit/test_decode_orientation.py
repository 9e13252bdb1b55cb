"""All eight orientations of every format that has them, against EXIF's own words."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image, ImageOps

from image_files import SHORT, Pixels, decoded, encoded, exif, jpeg_with_exif, oriented, png, rgb_array, tiff

HEIGHT, WIDTH = 5, 7


# EXIF's own words: where the first stored row and the first stored column are seen.
SIDES = {
    1: ("top", "left"), 2: ("top", "right"), 3: ("bottom", "right"), 4: ("bottom", "left"),
    5: ("left", "top"), 6: ("right", "top"), 7: ("right", "bottom"), 8: ("left", "bottom"),
}  # fmt: skip


def stored(upright: Pixels, orientation: int) -> Pixels:
    row, column = SIDES[orientation]
    pixels = upright if row in ("top", "bottom") else upright.transpose(1, 0, 2)
    pixels = pixels[::-1] if row in ("bottom", "right") else pixels
    return np.ascontiguousarray(pixels[:, ::-1] if column in ("bottom", "right") else pixels)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation(kind: str, orientation: int, order: str) -> None:
    upright = np.kron(rgb_array(2, 3, seed=8), np.ones((8, 8, 1), np.uint8))
    pixels = decoded(oriented(kind, stored(upright, orientation), orientation, order))
    assert pixels.shape == upright.shape
    assert np.abs(pixels.astype(int) - upright).max() <= (3 if kind == "JPEG" else 0)


def test_orientation_of_sixteen_bit_tiff() -> None:
    values = np.arange(6, dtype="<u2").reshape(2, 3) << 8
    file = tiff(3, 2, values.tobytes(), bits=(16,), tags={274: (SHORT, [6])})
    np.testing.assert_array_equal(decoded(file)[..., 0], [[3, 0], [4, 1], [5, 2]])


@pytest.mark.parametrize(
    "blocks", [(exif(6), exif(3)), (exif(1), exif(8)), (b"", exif(6)), (exif(8)[:14], exif(8)[14:])]
)
def test_orientation_of_several_exif_segments(blocks: tuple[bytes, bytes]) -> None:
    file = encoded(Image.fromarray(rgb_array()), "JPEG")
    for block in reversed(blocks):
        file = jpeg_with_exif(file, block)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
    assert np.array_equal(decoded(file), expected)


MALFORMED_EXIF = {
    "empty": b"",
    "garbage": b"\xff" * 40,
    "not a directory": b"II*\0\xff\xff\xff\xff",
    "cut": exif(6)[:-8],
    "many entries": b"II*\0\x08\0\0\0\xff\xff" + exif(6)[10:],
    "out of range": exif(9),
    "zero": exif(0),
}


@pytest.mark.parametrize("block", MALFORMED_EXIF.values(), ids=MALFORMED_EXIF)
def test_malformed_exif_never_fails_an_image(block: bytes) -> None:
    expected = rgb_array()
    kept = png(WIDTH, HEIGHT, 8, 2, [row.tobytes() for row in expected], before=[(b"eXIf", block)])
    pixels = decoded(kept)
    # "many entries" has a right orientation in front; all others have none
    assert pixels.shape in (expected.shape, (WIDTH, HEIGHT, 3))
    jpeg = encoded(Image.fromarray(expected), "JPEG", quality=100)
    assert decoded(jpeg_with_exif(jpeg, block)).size == expected.size
    assert decoded(encoded(Image.fromarray(expected), "WEBP", exif=b"Exif\0\0" + block)).size == expected.size


def test_orientation_elsewhere_is_not_read() -> None:
    expected = rgb_array()
    rows = [row.tobytes() for row in expected]
    xmp = b'<x tiff:Orientation="6"/>'
    text = b"XML:com.adobe.xmp\0\0\0\0\0" + xmp
    files = [
        png(WIDTH, HEIGHT, 8, 2, rows, after=[(b"eXIf", exif(6))]),
        png(WIDTH, HEIGHT, 8, 2, rows, before=[(b"iTXt", text)]),
    ]
    packed = struct.unpack(f"<{len(xmp) // 2}H", xmp[: len(xmp) // 2 * 2])
    files.append(tiff(WIDTH, HEIGHT, expected.tobytes(), bits=(8, 8, 8), photometric=2, tags={700: (SHORT, packed)}))
    for file in files:
        np.testing.assert_array_equal(decoded(file), expected)
