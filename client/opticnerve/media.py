"""What callers hand in, as items of the wire contract. Neither PIL nor torch is imported here."""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from opticnerve.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    from PIL.Image import Image

ImageSource: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | np.ndarray[Any, Any] | Image"
"""One image: the path of an image file, the bytes of one, a PIL image (RGB or L), or a numpy array of pixels: uint8
`[height, width, 3]` in RGB, or `[height, width]` in grey. Of PIL images and arrays the pixels are sent as they are: an
EXIF orientation is applied to files only, by the server."""

SizeSource: TypeAlias = "tuple[int, int] | str | os.PathLike[str] | bytes | bytearray | memoryview"
"""The size of one image: `(height, width)` in pixels, or an image file as a path or as its bytes."""

_BYTES = (bytes, bytearray, memoryview)


def to_items(sources: Iterable[ImageSource]) -> list[pb.Item]:
    """The items of `sources`; reads the files among them. Raises ValueError, TypeError or OSError naming the item."""
    if isinstance(sources, (str, os.PathLike, np.ndarray, *_BYTES)) or _is_pil(sources):
        raise TypeError("items is one image; put it into a list")
    return [_to_item(source, index) for index, source in enumerate(sources)]


def to_media_size(source: SizeSource, header_bytes: int, index: int) -> pb.MediaSize:
    """The size of one image, or the first `header_bytes` of its file."""
    if isinstance(source, tuple):
        height, width = source
        return pb.MediaSize(size=pb.MediaSize.Size(height=height, width=width))
    if isinstance(source, _BYTES):
        return pb.MediaSize(header=bytes(memoryview(source)[:header_bytes]))
    if isinstance(source, (str, os.PathLike)):
        with Path(source).open("rb") as file:
            return pb.MediaSize(header=file.read(header_bytes))
    raise TypeError(f"item {index}: {type(source).__name__} is no size: give (height, width), a path or bytes")


def digest(source: ImageSource) -> bytes:
    """SHA-256 of the canonical media, 32 bytes: the `digest` of the embedding that the server makes of `source`.

    Hashed are the ASCII kind and a zero byte; for pixels then height and width as 4-byte little-endian integers; then
    the bytes. A file and its decoded pixels have different digests.
    """
    [item] = to_items([source])
    if item.WhichOneof("media") == "encoded_image":
        return hashlib.sha256(b"encoded_image\0" + item.encoded_image.data).digest()
    image = item.raw_image
    return hashlib.sha256(b"raw_image\0" + struct.pack("<II", image.height, image.width) + image.data).digest()


def _to_item(source: ImageSource, index: int) -> pb.Item:
    if isinstance(source, (str, os.PathLike)):
        return pb.Item(encoded_image=pb.EncodedImage(data=Path(source).read_bytes()))
    if isinstance(source, _BYTES):
        return pb.Item(encoded_image=pb.EncodedImage(data=bytes(source)))
    if isinstance(source, np.ndarray):
        return _from_array(source, index)
    if _is_pil(source):
        return _from_pil(source, index)
    raise TypeError(f"item {index}: {type(source).__name__} is no image: give a path, bytes, PIL image or numpy array")


def _from_array(array: np.ndarray[Any, Any], index: int) -> pb.Item:
    grey = array.ndim == 2
    if array.dtype != np.uint8 or not (grey or (array.ndim == 3 and array.shape[2] == 3)) or array.size == 0:
        raise ValueError(
            f"item {index}: an array of {array.dtype} {list(array.shape)} is no image: give uint8 [height, width, 3] "
            "in RGB, or uint8 [height, width] in grey"
        )
    pixels = np.repeat(array[:, :, None], 3, axis=2) if grey else array
    height, width = array.shape[:2]
    return pb.Item(raw_image=pb.RawImage(height=height, width=width, data=pixels.tobytes()))


def _from_pil(image: Image, index: int) -> pb.Item:
    if image.mode not in ("RGB", "L"):
        raise ValueError(
            f"item {index}: a PIL image of mode {image.mode} is ambiguous: convert it to RGB or L, or send the file"
        )
    return _from_array(np.asarray(image), index)


def _is_pil(source: object) -> Any:
    """Whether this is a PIL image: it cannot be one where PIL was never imported."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(source, pil.Image)
