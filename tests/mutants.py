"""Damaged media files: real photographs in every format of the decode contract, and clips of them, changed by chance.

Number n is the same file on every machine with the same encoders: what went wrong once can be looked at again.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from image_files import encoded, exif, jpeg_with_exif, oriented
from video_files import encode

PHOTOGRAPHS = Path(__file__).parents[1] / "deploy" / "demo"
HEIGHT, WIDTH = 72, 96
BOUNDARIES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
"""Numbers that parsers of sizes and offsets stumble over."""


def photograph(shift: int = 0) -> Image.Image:
    """A detail of a photograph."""
    with Image.open(PHOTOGRAPHS / "rocket.jpg") as image:
        return image.convert("RGB").crop((300 + shift, 60, 300 + shift + WIDTH, 60 + HEIGHT))


def images() -> dict[str, bytes]:
    """An image of every format, and of every way to store one that a decoder has code of its own for."""
    rgb = photograph()
    grey, alpha, palette = rgb.convert("L"), rgb.convert("RGBA"), rgb.quantize(64)
    alpha.putalpha(grey)
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    frames = {"save_all": True, "append_images": [photograph(shift) for shift in (8, 16)]}
    files = {path.name: path.read_bytes() for path in PHOTOGRAPHS.iterdir() if path.name in ("cat.png", "coffee.webp")}
    return files | {
        "jpeg": encoded(rgb, "JPEG", quality=90),
        "jpeg, progressive": encoded(rgb, "JPEG", progressive=True, subsampling=0),
        "jpeg, restarts": encoded(rgb, "JPEG", restart_marker_blocks=2),
        "jpeg, grey": encoded(grey, "JPEG"),
        "jpeg, CMYK": encoded(rgb.convert("CMYK"), "JPEG"),
        "jpeg, turned": jpeg_with_exif(encoded(rgb, "JPEG"), exif(6)),
        "png": encoded(rgb, "PNG"),
        "png, alpha": encoded(alpha, "PNG"),
        "png, palette": encoded(palette, "PNG", transparency=3),
        "png, 16 bits": encoded(deep, "PNG"),
        "png, animated": encoded(rgb, "PNG", **frames),
        "png, turned": oriented("PNG", np.asarray(rgb), 8),
        "webp": encoded(rgb, "WEBP"),
        "webp, alpha": encoded(alpha, "WEBP"),
        "webp, lossless": encoded(rgb, "WEBP", lossless=True),
        "webp, animated": encoded(rgb, "WEBP", **frames),
        "gif": encoded(palette, "GIF"),
        "gif, animated": encoded(palette, "GIF", save_all=True, append_images=[photograph(8).quantize(64)]),
        "bmp": encoded(rgb, "BMP"),
        "bmp, palette": encoded(palette, "BMP"),
        "tiff": encoded(rgb, "TIFF"),
        "tiff, LZW": encoded(rgb, "TIFF", compression="tiff_lzw"),
        "tiff, deflate": encoded(alpha, "TIFF", compression="tiff_adobe_deflate"),
        "tiff, JPEG": encoded(rgb, "TIFF", compression="jpeg"),
        "tiff, fax": encoded(rgb.convert("1"), "TIFF", compression="group4"),
        "tiff, floats": encoded(grey.convert("F"), "TIFF"),
        "tiff, turned": oriented("TIFF", np.asarray(rgb), 5, ">"),
    }


def clips() -> dict[str, bytes]:
    """A clip of every container and codec."""
    pictures: list[npt.NDArray[np.uint8]] = [np.asarray(photograph(4 * shift)) for shift in range(5)]
    fast = {"preset": "ultrafast", "x265-params": "log-level=none"}
    webm = {"container": "webm", "options": {"deadline": "realtime", "cpu-used": "8"}}
    return {
        "mp4, H.264": encode(pictures),
        "mp4, H.264 in fragments": encode(pictures, container_options={"movflags": "frag_keyframe+empty_moov"}),
        "mp4, HEVC": encode(pictures, codec="libx265", options=fast),
        "mp4, AV1": encode(pictures, codec="libsvtav1", options={"preset": "13"}),
        "quicktime, MPEG-4": encode(pictures, container="mov", codec="mpeg4", options={"bf": "2"}),
        "matroska, H.264": encode(pictures, container="matroska"),
        "webm, VP8": encode(pictures, codec="libvpx", **webm),  # type: ignore[arg-type]
        "webm, VP9": encode(pictures, codec="libvpx-vp9", **webm),  # type: ignore[arg-type]
    }


def mutant(files: Mapping[str, bytes], number: int) -> bytes:
    """One of `files`, changed in one to four places; half of the PNGs with right checksums again."""
    chance = random.Random(number)
    data = bytearray(files[chance.choice(sorted(files))])
    for _ in range(chance.randint(1, 4)):
        chance.choice(CHANGES)(data, _place(chance, data), chance)
    if data.startswith(b"\x89PNG") and chance.random() < 0.5:
        _mend_png(data)
    return bytes(data)


def _place(chance: random.Random, data: bytearray) -> int:
    """An offset; every second one near the beginning, where the headers are."""
    return int(chance.random() ** chance.choice((1, 4)) * len(data))


def _flip(data: bytearray, at: int, chance: random.Random) -> None:
    if at < len(data):
        data[at] ^= 1 << chance.randrange(8)


def _set(data: bytearray, at: int, chance: random.Random) -> None:
    number, size = chance.choice(BOUNDARIES), chance.choice((1, 2, 4))
    data[at : at + size] = (number & (1 << 8 * size) - 1).to_bytes(size, chance.choice(("big", "little")))


def _scramble(data: bytearray, at: int, chance: random.Random) -> None:
    end = min(len(data), at + chance.randint(1, 64))
    data[at:end] = chance.randbytes(end - at)


def _remove(data: bytearray, at: int, chance: random.Random) -> None:
    del data[at : at + chance.randint(1, 64)]


def _insert(data: bytearray, at: int, chance: random.Random) -> None:
    data[at:at] = chance.choice((bytes(8), b"\xff" * 8, chance.randbytes(8)))


def _repeat(data: bytearray, at: int, chance: random.Random) -> None:
    data[at:at] = data[at : at + chance.randint(1, 512)] * chance.randint(1, 4)


def _move(data: bytearray, at: int, chance: random.Random) -> None:
    block = data[at : at + chance.randint(1, 512)]
    del data[at : at + len(block)]
    to = _place(chance, data)
    data[to:to] = block


def _cut(data: bytearray, at: int, chance: random.Random) -> None:
    if chance.random() < 0.3:
        del data[at:]


CHANGES: tuple[Callable[[bytearray, int, random.Random], None], ...] = (
    _flip, _set, _scramble, _remove, _insert, _repeat, _move, _cut,
)  # fmt: skip


def _mend_png(data: bytearray) -> None:
    """Right checksums for all chunks that are whole, so that what is wrong in them is not found by their checksums."""
    position = 8
    while position + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, position)
        end = position + 8 + length
        if end + 4 > len(data):
            return
        struct.pack_into(">I", data, end, zlib.crc32(data[position + 4 : end]))
        position = end + 4
