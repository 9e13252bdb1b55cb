"""Every kind of pixels that image files hold, against RGB computed here."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from image_files import SAMPLES, SHORT, WHITE, Pixels, decoded, encoded, png, refusal, rgb_array, tiff
from opticnerve_server.media.decode import CONTRACT

HEIGHT, WIDTH = 5, 7


def grey_rgb(grey: npt.NDArray[np.integer]) -> Pixels:
    return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2)


def composited(
    color: npt.NDArray[np.integer], alpha: npt.NDArray[np.integer], background: tuple[int, int, int]
) -> Pixels:
    """color [h, w, 3] over `background`, rounded to the nearest level."""
    weight = alpha.astype(np.float64)[..., None] / 255
    return np.floor(color * weight + np.array(background) * (1 - weight) + 0.5).astype(np.uint8)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"}), ("WEBP", {"lossless": True})],
)
def test_lossless_rgb(kind: str, options: dict[str, object]) -> None:
    expected = rgb_array()
    np.testing.assert_array_equal(decoded(encoded(Image.fromarray(expected), kind, **options)), expected)


@pytest.mark.parametrize("subsampling", [0, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg(subsampling: int, progressive: bool) -> None:
    expected = np.zeros((64, 48, 3), np.uint8)
    expected[:32], expected[32:] = (200, 30, 90), (10, 220, 130)
    file = encoded(Image.fromarray(expected), "JPEG", quality=100, subsampling=subsampling, progressive=progressive)
    difference = np.abs(decoded(file).astype(int) - expected)
    assert np.delete(difference, [31, 32], axis=0).max() <= 3  # subsampled colours blend across the edge


def test_palette() -> None:
    palette, index = rgb_array(1, 16)[0], np.arange(35).reshape(HEIGHT, WIDTH) % 16
    image = Image.new("P", (WIDTH, HEIGHT))
    image.putdata(index.ravel().tolist())
    image.putpalette(palette.tobytes())
    for kind in ("PNG", "GIF", "BMP", "TIFF"):
        np.testing.assert_array_equal(decoded(encoded(image, kind)), palette[index])


@pytest.mark.parametrize("order", ["<", ">"])
def test_sixteen_bit_colour_keeps_the_high_byte(order: str) -> None:
    values = np.random.default_rng(1).integers(0, 65536, (HEIGHT, WIDTH, 3), np.uint16)
    as_tiff = tiff(WIDTH, HEIGHT, values.astype(order + "u2").tobytes(), order=order, bits=(16, 16, 16), photometric=2)
    as_png = png(WIDTH, HEIGHT, 16, 2, [row.astype(">u2").tobytes() for row in values])
    for file in (as_tiff, as_png):
        np.testing.assert_array_equal(decoded(file), values >> 8)


def test_cmyk() -> None:
    cmyk = np.random.default_rng(2).integers(0, 256, (HEIGHT, WIDTH, 4), np.uint8)
    ink, black = 255 - cmyk[..., :3].astype(int), 255 - cmyk[..., 3:].astype(int)
    file = tiff(WIDTH, HEIGHT, cmyk.tobytes(), bits=(8,) * 4, photometric=5)
    assert np.abs(decoded(file) - ink * black / 255).max() <= 1


def flat_cmyk_jpeg(cmyk: tuple[int, int, int, int], transform: int) -> bytes:
    """A JPEG whose stored planes are the inverse of `cmyk`; transform 2 declares the first three YCbCr."""
    file = encoded(Image.new("CMYK", (16, 16), cmyk), "JPEG", quality=100, subsampling=0)
    flag = file.index(b"Adobe") + 11
    return file[:flag] + bytes([transform]) + file[flag + 1 :]


def test_cmyk_jpeg() -> None:
    cyan, magenta, yellow, black = cmyk = (40, 90, 200, 60)
    expected = [(255 - ink) * (255 - black) / 255 for ink in (cyan, magenta, yellow)]
    assert np.abs(decoded(flat_cmyk_jpeg(cmyk, 0)) - expected).max() <= 2


def test_ycck_jpeg() -> None:
    luma, blue, red, black = (255 - value for value in (100, 140, 110, 60))
    color = np.array(
        [
            luma + 1.402 * (red - 128),
            luma - 0.344136 * (blue - 128) - 0.714136 * (red - 128),
            luma + 1.772 * (blue - 128),
        ]
    )
    stored_cmy = 255 - color  # YCCK holds the YCbCr of 255 - CMY, and Adobe's CMY are inverted once more
    expected = stored_cmy * black / 255
    assert np.abs(decoded(flat_cmyk_jpeg((100, 140, 110, 60), 2)) - expected).max() <= 2


def test_ycbcr_tiff() -> None:
    ycbcr = np.array([[[100, 140, 110]] * 2] * 2, np.uint8)
    expected = [100 + 1.402 * -18, 100 - 0.344136 * 12 + 0.714136 * 18, 100 + 1.772 * 12]
    file = tiff(2, 2, ycbcr.tobytes(), bits=(8, 8, 8), photometric=6)
    assert np.abs(decoded(file) - expected).max() <= 1


def test_lab_is_refused_by_name() -> None:
    assert "LAB" in refusal(tiff(2, 2, bytes(12), bits=(8, 8, 8), photometric=8))


# --- grey


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_grey_of_few_bits(depth: int) -> None:
    top = 2**depth - 1
    values = np.random.default_rng(3).integers(0, top + 1, (3, 16), np.uint8)
    bits = np.unpackbits(values[..., None], axis=2)[..., 8 - depth :].reshape(3, -1)
    packed = [row.tobytes() for row in np.packbits(bits, axis=1)]
    expected = grey_rgb(values.astype(int) * 255 // top)
    np.testing.assert_array_equal(decoded(png(16, 3, depth, 0, packed)), expected)
    np.testing.assert_array_equal(decoded(tiff(16, 3, b"".join(packed), bits=(depth,))), expected)
    np.testing.assert_array_equal(decoded(tiff(16, 3, b"".join(packed), bits=(depth,), photometric=0)), 255 - expected)


def ramp() -> npt.NDArray[np.int64]:
    return np.linspace(0, 65535, 256 * 4).astype(np.int64).reshape(4, 256)


def test_sixteen_bit_grey_keeps_all_levels() -> None:
    values = ramp()
    files = [png(256, 4, 16, 0, [row.astype(">u2").tobytes() for row in values])]
    files += [tiff(256, 4, values.astype(o + "u2").tobytes(), order=o, bits=(16,)) for o in "<>"]
    for file in files:
        np.testing.assert_array_equal(decoded(file), grey_rgb(values >> 8))
    assert len(np.unique(decoded(files[0]))) == 256
    inverted = tiff(256, 4, values.astype("<u2").tobytes(), bits=(16,), photometric=0)
    np.testing.assert_array_equal(decoded(inverted), 255 - grey_rgb(values >> 8))


def test_twelve_bit_grey() -> None:
    values = np.random.default_rng(4).integers(0, 4096, (4, 8), np.uint16)
    bits = np.unpackbits(values.astype(">u2").view(np.uint8).reshape(4, 8, 2), axis=2)[..., 4:]
    np.testing.assert_array_equal(decoded(tiff(8, 4, np.packbits(bits).tobytes(), bits=(12,))), grey_rgb(values >> 4))


@pytest.mark.parametrize(
    ("dtype", "sample_format"), [("<u4", 1), ("<i4", 2), (">i4", 2), ("<i2", 2), (">i2", 2), ("<f4", 3), (">f4", 3)]
)
def test_wide_grey_is_scaled_from_its_own_range(dtype: str, sample_format: int) -> None:
    low, high = {1: (10, 2**32 - 1), 2: (-30000, 30000), 3: (-1.5, 2.5)}[sample_format]
    values = np.linspace(low, high, 1024).reshape(4, 256).astype(dtype)
    bits = np.dtype(dtype).itemsize * 8
    file = tiff(256, 4, values.tobytes(), order=dtype[0], bits=(bits,), tags={339: (SHORT, [sample_format])})
    span = values.astype(np.float64) - values.astype(np.float64).min()
    got = decoded(file)
    assert np.abs(got - (span * 255 / span.max())[..., None]).max() <= 0.5 + 1e-6
    assert len(np.unique(got)) == 256


def test_floats_that_are_not_finite() -> None:
    values = np.array([[np.nan, -np.inf, 0.0], [2.0, 1.0, np.inf]], np.float32)
    float_tag = {339: (SHORT, [3])}
    got = decoded(tiff(3, 2, values.tobytes(), bits=(32,), tags=float_tag))
    np.testing.assert_array_equal(got[..., 0], [[0, 0, 0], [255, 128, 255]])
    for constant in (np.nan, 7.0):
        file = tiff(3, 2, np.full(6, constant, np.float32).tobytes(), bits=(32,), tags=float_tag)
        assert decoded(file).max() == 0


# --- transparency

BACKGROUNDS = [(WHITE, (255, 255, 255)), ("#103050", (16, 48, 80))]


@pytest.mark.parametrize(("background", "rgb"), BACKGROUNDS)
def test_alpha_channel(background: str, rgb: tuple[int, int, int]) -> None:
    rgba = np.random.default_rng(5).integers(0, 256, (64, 64, 4), np.uint8)
    rgba[0, :2, 3] = 0, 255
    expected = composited(rgba[..., :3], rgba[..., 3], rgb)
    for kind, options in (("PNG", {}), ("TIFF", {}), ("WEBP", {"lossless": True, "exact": True})):
        np.testing.assert_array_equal(decoded(encoded(Image.fromarray(rgba), kind, **options), background), expected)
    wide = png(64, 64, 16, 6, [(row.astype(">u2") * 257).tobytes() for row in rgba])
    np.testing.assert_array_equal(decoded(wide, background), expected)


@pytest.mark.parametrize(("background", "rgb"), BACKGROUNDS)
def test_grey_with_alpha(background: str, rgb: tuple[int, int, int]) -> None:
    grey, alpha = np.random.default_rng(6).integers(0, 256, (2, HEIGHT, WIDTH), np.uint8)
    both = np.stack([grey, alpha], axis=2)
    expected = composited(grey_rgb(grey), alpha, rgb)
    files = [png(WIDTH, HEIGHT, 8, 4, [row.tobytes() for row in both])]
    files += [png(WIDTH, HEIGHT, 16, 4, [(row.astype(">u2") * 257).tobytes() for row in both])]
    files += [tiff(WIDTH, HEIGHT, both.tobytes(), bits=(8, 8), tags={338: (SHORT, [2])})]
    for file in files:
        np.testing.assert_array_equal(decoded(file, background), expected)


def test_premultiplied_alpha() -> None:
    alpha = np.array([[0, 255, 128]], np.uint8)
    premultiplied = np.array([[0, 200, 60]], np.uint8)
    expected = premultiplied.astype(int) + 255 - alpha  # over white
    as_la = tiff(3, 1, np.stack([premultiplied, alpha], 2).tobytes(), bits=(8, 8), tags={338: (SHORT, [1])})
    rgba = np.stack([premultiplied] * 3 + [alpha], 2)
    as_rgba = tiff(3, 1, rgba.tobytes(), bits=(8,) * 4, photometric=2, tags={338: (SHORT, [1])})
    for file in (as_la, as_rgba):
        assert np.abs(decoded(file).astype(int) - expected[..., None]).max() <= 1


@pytest.mark.parametrize(("background", "rgb"), BACKGROUNDS)
def test_palette_with_transparency(background: str, rgb: tuple[int, int, int]) -> None:
    palette, index = rgb_array(1, 4)[0], np.array([[0, 1, 2, 3]], np.uint8)
    for table in (b"\x00", b"\xff\x00", b"\x80\x00\xff\x01"):  # red index 0 of a bare convert among them
        alpha = np.frombuffer(table.ljust(4, b"\xff"), np.uint8)[index]
        file = png(4, 1, 8, 3, [index.tobytes()], before=[(b"PLTE", palette.tobytes()), (b"tRNS", table)])
        np.testing.assert_array_equal(decoded(file, background), composited(palette[index], alpha, rgb))


@pytest.mark.parametrize(("background", "rgb"), BACKGROUNDS)
def test_palette_with_an_alpha_channel(background: str, rgb: tuple[int, int, int]) -> None:
    palette, index = rgb_array(1, 256)[0], np.array([[0, 1, 2, 200]], np.uint8)
    with_alpha = np.stack([index, np.array([[0, 255, 128, 7]], np.uint8)], axis=2)
    color_map = (palette.T.astype(int) * 257).ravel().tolist()  # all reds, all greens, all blues, in 16 bits
    tags = {320: (SHORT, color_map), 338: (SHORT, [2])}
    file = tiff(4, 1, with_alpha.tobytes(), bits=(8, 8), photometric=3, tags=tags)
    np.testing.assert_array_equal(decoded(file, background), composited(palette[index], with_alpha[..., 1], rgb))


def test_gif_with_transparency() -> None:
    palette = np.array([[255, 0, 0], [0, 255, 0]], np.uint8)
    image = Image.new("P", (2, 1))
    image.putdata([0, 1])
    image.putpalette(palette.tobytes())
    file = encoded(image, "GIF", transparency=0)
    np.testing.assert_array_equal(decoded(file, "#0000ff")[0], [[0, 0, 255], [0, 255, 0]])


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_one_transparent_grey(depth: int) -> None:
    top = 2**depth - 1
    values = np.array([[0, top, top // 2, 0, 1, top, 0, 0]])
    key = top // 2 if depth > 1 else 1
    if depth == 16:
        rows = [values.astype(">u2").tobytes()]
    else:
        rows = [
            np.packbits(np.unpackbits(values.astype(np.uint8)[..., None], axis=2)[..., 8 - depth :].ravel()).tobytes()
        ]
    expected = grey_rgb(values >> 8 if depth == 16 else values * 255 // top)
    expected[values == key] = (1, 2, 3)
    file = png(8, 1, depth, 0, rows, before=[(b"tRNS", struct.pack(">H", key))])
    np.testing.assert_array_equal(decoded(file, "#010203"), expected)


def test_one_transparent_colour() -> None:
    expected = rgb_array()
    rows, key = [row.tobytes() for row in expected], expected[2, 3].tolist()
    file = png(WIDTH, HEIGHT, 8, 2, rows, before=[(b"tRNS", struct.pack(">3H", *key))])
    expected[(expected == key).all(axis=2)] = (9, 8, 7)
    np.testing.assert_array_equal(decoded(file, "#090807"), expected)
    wide = png(1, 1, 16, 2, [bytes(6)], before=[(b"tRNS", bytes(6))])
    assert "transparent colour" in refusal(wide)


# --- frames


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_first_frame(kind: str) -> None:
    colors = [(250, 10, 20), (20, 250, 10), (10, 20, 250)]
    frames = [Image.new("RGB", (6, 4), color) for color in colors]
    file = encoded(
        frames[0], kind, save_all=True, append_images=frames[1:], **({"lossless": True} if kind == "WEBP" else {})
    )
    np.testing.assert_array_equal(decoded(file), np.full((4, 6, 3), colors[0], np.uint8))


def test_gif_frame_larger_than_its_canvas() -> None:
    file = bytearray(encoded(Image.new("P", (6, 4)), "GIF"))
    file[6:10] = struct.pack("<HH", 2, 2)
    assert decoded(bytes(file)).shape == (4, 6, 3)


# --- as a whole


def test_threads() -> None:
    files = list(SAMPLES.values()) * 4
    alone = [decoded(file) for file in files]
    with ThreadPoolExecutor(8) as pool:
        for one, other in zip(alone, pool.map(decoded, files), strict=True):
            np.testing.assert_array_equal(one, other)


def test_contract_is_sentences() -> None:
    assert CONTRACT
    for topic, sentence in CONTRACT.items():
        assert topic.isascii()
        assert sentence.isascii()
        assert sentence[0].isupper()
        assert sentence.endswith(".")
