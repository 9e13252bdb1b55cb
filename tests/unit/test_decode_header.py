"""What the header alone decides: the size from a prefix, and the refusal of what is out of proportion."""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
import time
import zlib

import pytest
from PIL import Image, ImageFile

from image_files import LONG, MAX_PIXELS, SAMPLES, WHITE, decoded, encoded, exif, png, refusal, tiff
from opticnerve_server.media import header
from opticnerve_server.media.decode import MAX_SCANS, MediaError, NeedMoreData, decode, read_size


@pytest.mark.parametrize("file", SAMPLES.values(), ids=SAMPLES)
def test_size_from_every_prefix(file: bytes) -> None:
    expected = read_size(file, max_pixels=MAX_PIXELS)
    for length in range(len(file)):
        try:
            size, need_bytes = read_size(file[:length], max_pixels=MAX_PIXELS), len(file)
        except NeedMoreData as error:
            size, need_bytes = expected, error.need_bytes
        assert size == expected
        assert need_bytes > length


@pytest.mark.parametrize("file", SAMPLES.values(), ids=SAMPLES)
def test_asking_for_more_ends_soon(file: bytes) -> None:
    length, rounds = 1, 0
    while True:
        try:
            size = read_size(file[:length], max_pixels=MAX_PIXELS)
            break
        except NeedMoreData as error:
            length, rounds = error.need_bytes, rounds + 1
    assert rounds <= 4
    assert size == read_size(file, max_pixels=MAX_PIXELS)


def bombs() -> dict[str, bytes]:
    wide, high = 40_000, 30_000
    jpeg, gif, webp = SAMPLES["jpeg"], SAMPLES["gif"], SAMPLES["webp lossy"]
    frame = jpeg.index(b"\xff\xc0") + 5
    lossless = bytearray(SAMPLES["webp lossless"])
    lossless[21:25] = ((16383 - 1) | (16383 - 1) << 14).to_bytes(4, "little")
    extended = b"RIFF" + bytes(4) + b"WEBPVP8X" + struct.pack("<IB3x", 10, 0) + b"\xff\xff\xff" * 2 + bytes(50)
    return {
        "png": png(wide, high, 8, 2, [bytes(100)]),
        "png that compresses well": png(wide, high, 1, 0, [bytes(wide // 8)] * 1000),
        "jpeg": jpeg[:frame] + struct.pack(">HH", high, wide) + jpeg[frame + 4 :],
        "gif canvas": gif[:6] + struct.pack("<HH", wide, high) + gif[10:],
        "webp lossy": webp[:26] + struct.pack("<HH", 16383, 16383) + webp[30:],
        "webp lossless": bytes(lossless),
        "webp extended": extended,
        "bmp": SAMPLES["bmp"][:18] + struct.pack("<ii", wide, -high) + SAMPLES["bmp"][26:],
        "tiff": tiff(wide, high, bytes(100)),
        "turned": png(high, wide, 8, 2, [bytes(100)], before=[(b"eXIf", exif(6))]),
    }


BOMB_RUN = """
import pickle, resource, sys, time
from opticnerve_server.media.decode import MediaError, decode
files = pickle.load(sys.stdin.buffer)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before, slowest = peak(), 0.0
for name, file in files.items():
    start = time.process_time()
    try:
        decode(file, max_pixels=8192 * 8192, background="#ffffff")
    except MediaError as error:
        assert "the limit is" in str(error), (name, str(error))
    else:
        raise AssertionError(name)
    slowest = max(slowest, time.process_time() - start)
print(peak() - before, slowest)
"""


def test_bombs_are_refused_from_the_header() -> None:

    run = subprocess.run([sys.executable, "-c", BOMB_RUN], input=pickle.dumps(bombs()), capture_output=True, check=True)
    kilobytes, seconds = run.stdout.split()
    assert int(kilobytes) < 50_000
    assert float(seconds) < 0.05


def test_limit_is_exact() -> None:
    file = encoded(Image.new("RGB", (40, 25)), "PNG")
    assert decode(file, max_pixels=1000, background=WHITE).shape == (25, 40, 3)
    with pytest.raises(MediaError, match=r"25 x 40 pixels, the limit is 999 in all"):
        read_size(file, max_pixels=999)


def test_pillow_has_no_opinion_of_its_own() -> None:
    assert Image.MAX_IMAGE_PIXELS is None
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_jpeg_of_too_many_scans() -> None:
    assert "scans" in refusal(SAMPLES["jpeg"] + b"\xff\xda" * MAX_SCANS)


def test_tiff_whose_tags_share_their_bytes() -> None:
    tags = {tag: (LONG, [7] * 500) for tag in range(40_000, 40_004)}
    file = tiff(4, 4, bytes(16), tags=tags)
    decoded(file)
    start = struct.unpack_from("<I", file, 4)[0]
    shared = bytearray(file)
    for entry in range(struct.unpack_from("<H", file, start)[0]):
        at = start + 2 + 12 * entry
        if struct.unpack_from("<H", file, at)[0] >= 40_000:
            struct.pack_into("<II", shared, at + 4, len(file) // 4 - 30, 8)
    assert "ends within its header" in refusal(bytes(shared))


def test_tiff_out_of_proportion() -> None:
    strips = tiff(4, 4, bytes(16), tags={273: (LONG, [8] * (header.MAX_TIFF_STRIPS + 1))})
    assert "strips" in refusal(strips)
    tiles = tiff(4, 4, bytes(16), tags={322: (LONG, [60_000]), 323: (LONG, [60_000])})
    assert "tiles" in refusal(tiles)


@pytest.mark.parametrize(
    "flood",
    [
        b"\xff\xd8" + b"\xff" * 200_000,
        b"\xff\xd8\xff" + b"\xff" * 65_500 + b"\xd9" * 100,
        b"\xff\xd8" + b"\xff\0" * 100_000,
        b"\xff\xd8\xff" + b"\xe0\0\2\xff" * 200_000,
        b"\xff\xd8\xff" + b"\xd0\xff" * 200_000,
        b"GIF89a" + bytes(200_000),
    ],
)
def test_header_of_endless_segments(flood: bytes) -> None:
    assert "header" in refusal(flood)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        with pytest.raises(MediaError):
            read_size(flood, max_pixels=MAX_PIXELS)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.02


def test_fill_bytes_before_a_marker() -> None:
    file = SAMPLES["jpeg"]
    size = read_size(file, max_pixels=MAX_PIXELS)
    filled = file[:2] + b"\xff\0junk" + b"\xff" * (header.MAX_FILL_BYTES - 6) + file[2:]
    assert read_size(filled, max_pixels=MAX_PIXELS) == size
    assert "header" in refusal(file[:2] + b"\xff" * (header.MAX_FILL_BYTES + 1) + file[2:])
    alone = b"\xff\xd0\xff\x01" * header.MAX_SEGMENTS
    assert read_size(file[:2] + alone + file[2:], max_pixels=MAX_PIXELS) == size


def test_png_of_endless_chunks() -> None:
    empty = struct.pack(">I4sI", 0, b"teXt", zlib.crc32(b"teXt"))
    file = SAMPLES["png"]
    assert "header" in refusal(file[:33] + empty * 70_000 + file[33:])
