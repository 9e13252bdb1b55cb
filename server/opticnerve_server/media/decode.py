"""Image file -> RGB: the one decode contract of the server, on Pillow.

Pillow sees a file only after `header.py` has read its size and found its structure in proportion.
"""

from __future__ import annotations

import io
import logging
import warnings

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from .header import Header, MediaError, NeedMoreData, read_header, read_size

__all__ = ["CONTRACT", "MediaError", "NeedMoreData", "decode", "read_size"]

CONTRACT: dict[str, str] = {
    "formats": "JPEG, PNG, WebP, GIF, BMP and TIFF (not BigTIFF), known by their first bytes; all others are refused.",
    "size": "Read from the header; over max_image_pixels an image is refused before it is decoded.",
    "orientation": "EXIF orientation 1 to 8 is applied: of a JPEG from the Exif segments before its frame header, "
    "of a PNG from an eXIf chunk before its pixels, of a WebP from its EXIF chunk, of a TIFF from its first directory. "
    "Malformed EXIF counts as 1; XMP is not read.",
    "alpha": "Transparency of every kind (an alpha channel, a palette's, one transparent colour) is composited on the "
    "background colour, each channel rounded to the nearest level.",
    "16-bit": "Samples of 16 bits keep their high byte, in grey as in colour; samples of 12 bits the upper 8.",
    "32-bit": "Grey of 32-bit or signed integers or of floats is scaled linearly, its least finite value to 0 and its "
    "greatest to 255; NaN and one-valued images become black.",
    "grey": "Grey and 1-bit images have three equal channels.",
    "cmyk": "CMYK and YCCK become RGB by R = (255 - C)(255 - K) / 255, G and B alike; CMYK of a JPEG is taken for "
    "inverted, as Adobe writes it.",
    "colour": "YCbCr becomes RGB by BT.601 in full range; LAB is refused. Colour profiles are not applied.",
    "frames": "Of animations and files of several pages the first frame is taken.",
    "damage": "A truncated file, or one that the decoder finds corrupt, is refused; other damage decodes as it may.",
}
"""What becomes of unusual files, as sentences by topic."""

MAX_SCANS = 256
"""Scans of a JPEG file. A progressive one has about ten; each passes over the whole image, however few its bytes."""

# What is too large and what is broken is said here and in header.py, not by Pillow's global settings. Its warnings and
# log lines are about files that are refused here, or about metadata that is not used.
Image.MAX_IMAGE_PIXELS = None
ImageFile.LOAD_TRUNCATED_IMAGES = False
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
logging.getLogger("PIL").setLevel(logging.CRITICAL)

_PHOTOMETRIC, _SAMPLE_FORMAT = 262, 339  # TIFF tags

_PLUGINS: dict[str, type[ImageFile.ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WebP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
}

_TURNED_BY_PILLOW = {"TIFF"}
"""Formats whose orientation Pillow applies while it loads."""

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(data: bytes, *, max_pixels: int, background: str) -> npt.NDArray[np.uint8]:
    """An image file as upright RGB: uint8 [height, width, 3], C-contiguous, perhaps read-only.

    Height and width are those of `read_size`. `background` is "#rrggbb". Any thread. Raises MediaError for whatever is
    wrong with the file.
    """
    header = read_header(data, max_pixels=max_pixels)
    if header.format == "JPEG" and data.count(b"\xff\xda") > MAX_SCANS:
        raise MediaError(f"the JPEG file has more than {MAX_SCANS} scans: save it anew")
    try:
        rgb = _to_rgb(_open(data, header), background)
    except MediaError:
        raise
    except Exception as error:  # SyntaxError, struct.error, KeyError, ...: whatever Pillow's parsers stumble over
        raise MediaError(
            f"the {header.format} file is truncated, damaged or of a kind that is not supported: "
            "send it whole, or save it anew"
        ) from error
    if header.format not in _TURNED_BY_PILLOW and header.orientation > 1:
        rgb = rgb.transpose(_UPRIGHT[header.orientation])
    _expect_size(rgb, header.width, header.height)
    return np.asarray(rgb)


def _open(data: bytes, header: Header) -> ImageFile.ImageFile:
    """Pillow's view of the file, without pixels: nothing is allocated for a size that was not checked."""
    image = _PLUGINS[header.format](io.BytesIO(data))
    if header.format not in _TURNED_BY_PILLOW and header.orientation > 4:
        _expect_size(image, header.height, header.width)
    else:
        _expect_size(image, header.width, header.height)
    image.info.pop("xmp", None)  # Pillow would turn a TIFF by it
    return image


def _expect_size(image: Image.Image, width: int, height: int) -> None:
    if image.size != (width, height):
        raise MediaError("the image file contradicts itself about its size: save it anew")


def _to_rgb(image: ImageFile.ImageFile, background: str) -> Image.Image:
    """Load the pixels and make them RGB by the rules of CONTRACT."""
    samples = str(image.tile[0][3]) if image.tile else ""  # how the file stores them, which loading forgets
    image.load()
    match image.mode:
        case "CMYK" | "YCbCr":
            return image.convert("RGB")
        case "P" if "transparency" not in image.info and image.palette is not None and image.palette.mode == "RGB":
            return image.convert("RGB")
        case "P" | "PA" | "LA" | "RGBA":
            return _composite(image.convert("RGBA"), background)
        case "La":
            return _composite(image.convert("LA").convert("RGBA"), background)
        case "1" | "L" | "RGB" | "I;16" | "I;16B" | "I;16L" | "I;16N":
            color_key = image.info.pop("transparency", None)
            rgb: Image.Image = _high_byte(image, samples) if image.mode.startswith("I;16") else image
            rgb = rgb if rgb.mode == "RGB" else rgb.convert("RGB")  # to its own mode, `convert` copies
            if color_key is not None:
                rgb.paste(background, mask=_matches(image, color_key, samples))
            return rgb
        case "I" | "F":
            return _stretch(image).convert("RGB")
        case mode:
            raise MediaError(f"{mode} colour is not supported: save the image as RGB")


def _composite(rgba: Image.Image, background: str) -> Image.Image:
    canvas = Image.new("RGB", rgba.size, background)
    canvas.paste(rgba.convert("RGB"), mask=rgba.getchannel("A"))
    return canvas


def _matches(image: Image.Image, color_key: int | tuple[int, int, int], samples: str) -> Image.Image:
    """Where the pixels are the transparent colour, which the file gives in units of its own samples."""
    if isinstance(color_key, tuple):
        if ";16" in samples:
            raise MediaError("one transparent colour among 16-bit colours is not supported: save the image in 8 bits")
        return Image.fromarray((np.asarray(image) == color_key).all(axis=2))
    if image.mode == "1":
        color_key = color_key > 0
    elif image.mode == "L":  # Pillow spreads samples of fewer bits over 0..255, but not the key
        color_key *= {"L;2": 85, "L;4": 17}.get(samples, 1)
    return Image.fromarray(np.asarray(np.asarray(image) == color_key))


def _high_byte(image: Image.Image, samples: str) -> Image.Image:
    shift = 4 if "I;12" in samples else 8
    return _white_is_zero(image, (np.asarray(image) >> shift).astype(np.uint8))


def _stretch(image: Image.Image) -> Image.Image:
    """Scale grey values from their own range to 0..255, in bands of rows: float64 of all would be 8 bytes a pixel."""
    values = np.asarray(image)
    if isinstance(image, TiffImageFile) and image.mode == "I" and image.tag_v2.get(_SAMPLE_FORMAT, (1,))[0] == 1:
        values = values.view(np.uint32)  # Pillow has no unsigned type and lets the upper half wrap
    grey = np.zeros(values.shape, np.uint8)
    bands = [slice(top, top + 256) for top in range(0, len(values), 256)]
    finite = [band[np.isfinite(band)] for band in (values[rows] for rows in bands)]
    low = min((float(band.min()) for band in finite if band.size), default=0.0)
    high = max((float(band.max()) for band in finite if band.size), default=0.0)
    if high > low:
        for rows in bands:
            scaled = (values[rows].astype(np.float64) - low) * (255 / (high - low))
            grey[rows] = np.rint(np.clip(np.nan_to_num(scaled, nan=0.0), 0, 255)).astype(np.uint8)
    return _white_is_zero(image, grey)


def _white_is_zero(image: Image.Image, grey: npt.NDArray[np.uint8]) -> Image.Image:
    """Pillow inverts the grey of such a TIFF in 8 bits alone."""
    inverted = isinstance(image, TiffImageFile) and image.tag_v2.get(_PHOTOMETRIC) == 0
    return Image.fromarray(255 - grey if inverted else grey)
