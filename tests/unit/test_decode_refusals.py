"""Bad files are refused in a few clean words."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from image_files import SAMPLES, decoded, encoded, png, refusal, rgb_array, tiff
from opticnerve_server.media.decode import MediaError


@pytest.mark.parametrize("file", SAMPLES.values(), ids=SAMPLES)
def test_truncated(file: bytes) -> None:
    image = Image.fromarray(rgb_array(80, 80))
    whole = {b"\xff\xd8": "JPEG", b"\x89P": "PNG", b"RI": "WEBP", b"GI": "GIF", b"BM": "BMP", b"II": "TIFF"}[file[:2]]
    larger = encoded(image.quantize(64) if whole == "GIF" else image, whole)
    for cut in (128, len(larger) // 2):
        refusal(larger[:-cut])
    refusal(file[: len(file) // 2])
    refusal(file[:9])


OTHER_FORMATS = {
    "empty": b"",
    "text": b"hello",
    "zeros": bytes(5000),
    "PDF": b"%PDF-1.7\n" + bytes(99),
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n" + bytes(99),
    "Photoshop": b"8BPS\0\1" + bytes(99),
    "FITS": b"SIMPLE  =" + bytes(99),
    "AVIF": b"\0\0\0\x20ftypavif" + bytes(99),
    "a RIFF that is no WebP": b"RIFF\x10\0\0\0WAVEfmt " + bytes(99),
    "icon": encoded(Image.new("RGB", (16, 16)), "ICO"),
    "PPM": encoded(Image.new("RGB", (16, 16)), "PPM"),
}


@pytest.mark.parametrize("file", OTHER_FORMATS.values(), ids=OTHER_FORMATS)
def test_other_formats_are_refused(file: bytes) -> None:
    text = refusal(file)
    if len(file) >= 12:
        assert "JPEG, PNG, WebP, GIF, BMP, TIFF" in text


def test_bigtiff_is_refused_by_name() -> None:
    assert "BigTIFF" in refusal(b"II+\0\x08\0\0\0" + bytes(40))


def test_zero_sizes() -> None:
    for file in (png(0, 5, 8, 2, []), png(5, 0, 8, 2, []), tiff(0, 3, b""), SAMPLES["bmp"][:18] + bytes(8) + bytes(99)):
        assert "no pixels" in refusal(file)


def test_error_text_holds_nothing_of_the_file() -> None:
    secret = b"SECRETSECRET"
    files = [
        png(4, 4, 16, 2, [secret[:6]] * 3, before=[(b"seCr", secret)]),
        b"\xff\xd8\xff\xe0" + secret * 9,
        secret * 9,
    ]
    files += [
        b"GIF89a" + secret * 9,
        b"BM" + secret * 9,
        b"II*\0" + secret * 9,
        b"RIFF" + secret[:4] + b"WEBP" + secret * 9,
    ]
    for file in files:
        assert "SECRET" not in refusal(file)


def test_a_second_size_is_refused_before_its_pixels_are_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(image: ImageFile.ImageFile) -> None:
        raise AssertionError(f"{image.size} was loaded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    jpeg = SAMPLES["jpeg"]
    frame = jpeg.index(b"\xff\xc0")
    second = jpeg[frame : frame + 5] + struct.pack(">HH", 60_000, 60_000) + jpeg[frame + 9 : frame + 19]
    assert "contradicts itself" in refusal(jpeg[: frame + 19] + second + jpeg[frame + 19 :])


@settings(max_examples=600, deadline=None)
@given(
    name=st.sampled_from(sorted(SAMPLES)),
    edits=st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=4)), max_size=6),
    focus=st.floats(0.02, 1),
    keep=st.floats(0.5, 1),
)
def test_mutated_files_decode_or_are_refused(
    name: str, edits: list[tuple[float, bytes]], focus: float, keep: float
) -> None:
    data = bytearray(SAMPLES[name])
    for position, replacement in edits:
        at = int(position * focus * (len(data) - 1))
        data[at : at + len(replacement)] = replacement
    del data[int(keep * len(data)) :]
    try:
        decoded(bytes(data))
    except MediaError:
        refusal(bytes(data))
