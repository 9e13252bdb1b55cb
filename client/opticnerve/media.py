"""What callers hand in, as items of the wire contract. Neither PIL nor torch is imported here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np

from opticnerve.digests import digest_of
from opticnerve.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

ImageSource: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | np.ndarray[Any, Any] | Image"
"""One image: the path of an image file, the bytes of one, a PIL image (RGB or L), or a numpy array of pixels: uint8
`[height, width, 3]` in RGB, or `[height, width]` in grey. Of PIL images and arrays the pixels are sent as they are: an
EXIF orientation is applied to files only, by the server."""

FileSource: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview"
"""A file, as its path or its bytes."""

MAX_SIZE = (1 << 32) - 1
"""Largest side or number of frames that the wire has room for."""

_BYTES = (bytes, bytearray, memoryview)
_TENSOR_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "uint8": np.dtype(np.uint8),
    "int64": np.dtype("<i8"),
}


@dataclass(frozen=True, slots=True)
class Video:
    """A video file: MP4, QuickTime, WebM or Matroska.

    `fps` is the rate to sample at, `num_frames` the exact number of frames to sample; they exclude each other. What is
    None is the model's own.
    """

    source: FileSource
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Frames:
    """A video as images of one size, `fps` of them a second. They are sampled as those of a `Video` are;
    `sample_fps` is the rate to sample at.
    """

    frames: Sequence[ImageSource]
    fps: float
    sample_fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """One image or one video as the model's official processor returns it: "pixel_values" and "image_grid_thw", or
    "pixel_values_videos" and "video_grid_thw"; of Gemma 4 "image_position_ids" and "video_position_ids" instead of
    grids. Numpy arrays or torch tensors of float32, bfloat16, uint8 or int64.
    """

    tensors: Mapping[str, np.ndarray[Any, Any] | Tensor]


@dataclass(frozen=True, slots=True)
class Digest:
    """Media that the server may have encoded already, by their `digest`. Of a video the sampling must be the same as
    when it was sent.
    """

    sha256: bytes
    sample_fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None


@dataclass(frozen=True, slots=True)
class VideoSize:
    """What a plan of a video needs: how many frames it has, how many of them a second, their size in pixels. Sampling
    is that of `Frames`.
    """

    frames: int
    fps: float
    height: int
    width: int
    sample_fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None


MediaSource: TypeAlias = "ImageSource | Video | Frames | Patches | Digest"
"""One item to encode: an image, or a value that says what else it is."""

SizeSource: TypeAlias = "tuple[int, int] | VideoSize | FileSource"
"""The size of one item: `(height, width)` of an image in pixels, an image file, or a VideoSize."""


def to_items(sources: Iterable[MediaSource]) -> list[pb.Item]:
    """The items of `sources`; reads the files among them. Raises ValueError, TypeError or OSError naming the item."""
    single = (str, os.PathLike, np.ndarray, *_BYTES, Video, Frames, Patches, Digest)
    if isinstance(sources, single) or _is_instance("PIL.Image", "Image", sources):
        raise TypeError("items is one item; put it into a list")
    return [_to_item(source, f"item {index}") for index, source in enumerate(sources)]


def to_media_size(source: SizeSource, header_bytes: int, index: int) -> pb.MediaSize:
    """The size of one item, or the first `header_bytes` of its file. Raises as `to_items` does."""
    if isinstance(source, (tuple, VideoSize)):
        try:
            return pb.MediaSize(size=_to_size(source))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"item {index}: {source} is no size: give whole numbers from 0 to {MAX_SIZE}, and rates as numbers"
            ) from error
    if isinstance(source, _BYTES):
        return pb.MediaSize(header=bytes(memoryview(source)[:header_bytes]))
    if isinstance(source, (str, os.PathLike)):
        with Path(source).open("rb") as file:
            return pb.MediaSize(header=file.read(header_bytes))
    raise TypeError(
        f"item {index}: {type(source).__name__} is no size: give (height, width), a VideoSize, a path or bytes"
    )


def _to_size(source: tuple[int, int] | VideoSize) -> pb.MediaSize.Size:
    if isinstance(source, VideoSize):
        size = pb.MediaSize.Size(height=source.height, width=source.width, frames=source.frames, fps=source.fps)
        size.sampling.CopyFrom(_sampling(source, source.sample_fps))
        return size
    height, width = source
    return pb.MediaSize.Size(height=height, width=width)


def digest(source: MediaSource) -> bytes:
    """SHA-256 of the canonical media, 32 bytes: the `digest` of the embedding that the server makes of `source`.

    A file and its decoded pixels have different digests; how a video is sampled is not part of it.
    """
    [item] = to_items([source])
    return digest_of(item)


def _to_item(source: MediaSource, name: str) -> pb.Item:
    if isinstance(source, Video):
        data = _read(source.source)
        if data is None:
            raise TypeError(f"{name}: {type(source.source).__name__} is no video file: give a path or bytes")
        return pb.Item(encoded_video=pb.EncodedVideo(data=data, sampling=_sampling(source, source.fps)))
    if isinstance(source, Frames):
        frames = [_to_frame(frame, f"{name}: frame {index}") for index, frame in enumerate(source.frames)]
        sampling = _sampling(source, source.sample_fps)
        return pb.Item(frame_list=pb.FrameList(frames=frames, fps=source.fps, sampling=sampling))
    if isinstance(source, Digest):
        sampling = _sampling(source, source.sample_fps)
        return pb.Item(digest=pb.Digest(sha256=source.sha256, sampling=sampling))
    if isinstance(source, Patches):
        tensors = [_to_tensor(key, tensor, name) for key, tensor in source.tensors.items()]
        return pb.Item(patches=pb.Patches(tensors=tensors))
    image = _to_image(source, name)
    return pb.Item(raw_image=image) if isinstance(image, pb.RawImage) else pb.Item(encoded_image=image)


def _to_frame(source: ImageSource, name: str) -> pb.Frame:
    image = _to_image(source, name)
    return pb.Frame(raw_image=image) if isinstance(image, pb.RawImage) else pb.Frame(encoded_image=image)


def _to_image(source: ImageSource, name: str) -> pb.EncodedImage | pb.RawImage:
    data = _read(source)
    if data is not None:
        return pb.EncodedImage(data=data)
    if isinstance(source, np.ndarray):
        return _from_array(source, name)
    if _is_instance("PIL.Image", "Image", source):
        return _from_pil(source, name)
    raise TypeError(f"{name}: {type(source).__name__} is no image: give a path, bytes, PIL image or numpy array")


def _read(source: object) -> bytes | None:
    """The bytes of a file, None where `source` is neither a path nor bytes."""
    if isinstance(source, (str, os.PathLike)):
        return Path(source).read_bytes()
    return bytes(source) if isinstance(source, _BYTES) else None


def _from_array(array: np.ndarray[Any, Any], name: str) -> pb.RawImage:
    grey = array.ndim == 2
    if array.dtype != np.uint8 or not (grey or (array.ndim == 3 and array.shape[2] == 3)) or array.size == 0:
        raise ValueError(
            f"{name}: an array of {array.dtype} {list(array.shape)} is no image: give uint8 [height, width, 3] "
            "in RGB, or uint8 [height, width] in grey"
        )
    pixels = np.repeat(array[:, :, None], 3, axis=2) if grey else array
    height, width = array.shape[:2]
    return pb.RawImage(height=height, width=width, data=pixels.tobytes())


def _from_pil(image: Any, name: str) -> pb.RawImage:
    if image.mode not in ("RGB", "L"):
        raise ValueError(
            f"{name}: a PIL image of mode {image.mode} is ambiguous: convert it to RGB or L, or send the file"
        )
    return _from_array(np.asarray(image), name)


def _to_tensor(key: str, tensor: Any, name: str) -> pb.NamedTensor:
    array = _from_torch(tensor) if _is_instance("torch", "Tensor", tensor) else tensor
    if not isinstance(array, np.ndarray) or array.dtype.name not in _TENSOR_DTYPES:
        kind = f"array of {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
        known = ", ".join(_TENSOR_DTYPES)
        raise ValueError(f"{name}: {key} is of type {kind}: give a numpy array or a torch tensor of {known}")
    dtype = array.dtype.name
    data = array.astype(_TENSOR_DTYPES[dtype], copy=False).tobytes()
    return pb.NamedTensor(name=key, dtype=dtype, shape=array.shape, data=data)


def _from_torch(tensor: Any) -> Any:
    """A numpy view of a tensor, copied from its device. numpy knows bfloat16 by ml_dtypes alone."""
    torch = sys.modules["torch"]
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _sampling(source: Video | Frames | Digest | VideoSize, fps: float | None) -> pb.Sampling:
    return pb.Sampling(
        fps=fps, num_frames=source.num_frames, min_frames=source.min_frames, max_frames=source.max_frames
    )


def _is_instance(module: str, name: str, value: object) -> bool:
    """Whether `value` is of a class of a package that this one does not import: it cannot be where nobody has."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))
