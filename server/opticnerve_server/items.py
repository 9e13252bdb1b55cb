"""What callers send, kind by kind: what it is by its header, what it becomes, and its pixels.

`Media.plan` reads headers, so that nothing is decoded before it is admitted; `Media.fill` decodes, a video frame by
frame. Both raise MediaError, PlanError or ServiceError, which end the item alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from opticnerve.v1 import encoder_pb2 as pb

from .config import Config
from .limits import check_modality, check_pixels, check_plan, invalid, plan_image, plan_video
from .media import video
from .media.container import is_video
from .media.decode import MediaError, decode, read_size
from .models.base import Planner, Sampling, VideoItem
from .models.patches import grid_of
from .types import ItemPlan

TENSOR_DTYPES = {
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "uint8": np.dtype(np.uint8),
    "int64": np.dtype("<i8"),
}
"""The formats of NamedTensor."""

PATCH_TENSORS = {
    ("pixel_values", "image_grid_thw"): "image",
    ("pixel_values_videos", "video_grid_thw"): "video",
    ("pixel_values", "image_position_ids"): "image",
    ("pixel_values_videos", "video_position_ids"): "video",
}
"""What official processors call patches and their grid, or their positions in it; and the kind of the item."""

Pixels = npt.NDArray[np.uint8]


class Abandoned(Exception):
    """Nobody waits for these pixels any more."""


class Media(Protocol):
    """The media of one item."""

    def plan(self, planner: Planner, config: Config) -> ItemPlan:
        """Probe and plan, within the limits of `config`; no pixels."""
        ...

    def fill(self, planner: Planner, plan: ItemPlan, config: Config, out: Pixels, wanted: Callable[[], bool]) -> None:
        """Decode and resize into `out` [plan.pixel_bytes]. Raises Abandoned between frames once `wanted` says no."""
        ...


def media_of(item: pb.Item, config: Config) -> Media:
    """The media of a request's item. Raises ServiceError or PlanError for what the server does not take."""
    media: Media
    match item.WhichOneof("media"):
        case "encoded_image":
            media = Still(item.encoded_image)
        case "raw_image":
            media = Still(item.raw_image)
        case "encoded_video":
            media = VideoFile(item.encoded_video)
        case "frame_list":
            media = Frames(item.frame_list)
        case "patches":
            return Patches.of(item.patches, config)
        case _:
            raise invalid("the item has no media: set one of encoded_image, raw_image, encoded_video, frame_list")
    check_modality("image" if isinstance(media, Still) else "video", config)
    return media


def sampling_of(message: pb.Sampling) -> Sampling:
    """How the caller wants frames chosen."""
    return Sampling(**{field.name: value for field, value in message.ListFields()})


@dataclass(frozen=True, slots=True)
class Still:
    """An image. Bytes fields of messages are copied by every access: they are read once, where they are needed."""

    image: pb.EncodedImage | pb.RawImage

    def plan(self, planner: Planner, config: Config) -> ItemPlan:
        """See Media."""
        return plan_image(planner, config, *_size_of(self.image, config))

    def fill(self, planner: Planner, plan: ItemPlan, config: Config, out: Pixels, wanted: Callable[[], bool]) -> None:
        """See Media."""
        planner.fill_pixels(_pixels_of(self.image, config), plan, out)


@dataclass(frozen=True, slots=True)
class VideoFile:
    """A video file."""

    message: pb.EncodedVideo

    def plan(self, planner: Planner, config: Config) -> ItemPlan:
        """See Media."""
        limits = video.VideoLimits(config.max_video_frames, config.max_image_pixels, config.max_video_seconds)
        found = video.probe(self.message.data, limits)
        sampling = sampling_of(self.message.sampling)
        item = VideoItem(found.frames, found.fps, found.height, found.width, sampling)
        return plan_video(planner, config, item)

    def fill(self, planner: Planner, plan: ItemPlan, config: Config, out: Pixels, wanted: Callable[[], bool]) -> None:
        """See Media."""
        frames = video.frames(self.message.data, plan.frame_indices, max_frame_pixels=config.max_image_pixels)
        planner.fill_pixels(_while(wanted, frames), plan, out)


@dataclass(frozen=True, slots=True)
class Frames:
    """A video as a list of images."""

    message: pb.FrameList

    def plan(self, planner: Planner, config: Config) -> ItemPlan:
        """See Media. Reads the header of every frame: all must have one size, whichever of them are taken."""
        frames = self.message.frames
        if not frames:
            raise invalid("the frame list has no frames: send at least one")
        if len(frames) > config.max_video_frames:
            raise invalid(
                f"the frame list has {len(frames)} frames, the limit is {config.max_video_frames} (max_video_frames): "
                "send fewer"
            )
        height, width = self._size(0, config)
        for index in range(1, len(frames)):
            if self._size(index, config) != (height, width):
                raise invalid(
                    f"frames[{index}] is not {height} x {width} pixels as frames[0] is: resize all to one size"
                )
        item = VideoItem(len(frames), self.message.fps, height, width, sampling_of(self.message.sampling))
        return plan_video(planner, config, item)

    def fill(self, planner: Planner, plan: ItemPlan, config: Config, out: Pixels, wanted: Callable[[], bool]) -> None:
        """See Media."""
        frames = (self._decoded(index, config) for index in plan.frame_indices)
        planner.fill_pixels(_while(wanted, frames), plan, out)

    def _size(self, index: int, config: Config) -> tuple[int, int]:
        try:
            return _size_of(self._image(index), config)
        except MediaError as error:
            raise MediaError(f"frames[{index}]: {error}") from error

    def _decoded(self, index: int, config: Config) -> Pixels:
        try:
            return _pixels_of(self._image(index), config)
        except MediaError as error:
            raise MediaError(f"frames[{index}]: {error}") from error

    def _image(self, index: int) -> pb.EncodedImage | pb.RawImage:
        frame = self.message.frames[index]
        match frame.WhichOneof("media"):
            case "encoded_image":
                return frame.encoded_image
            case "raw_image":
                return frame.raw_image
            case _:
                raise invalid(f"frames[{index}] has no media: set encoded_image or raw_image")


@dataclass(frozen=True, slots=True)
class Patches:
    """What the model's official processor made of an image or a video."""

    kind: str  # "image" or "video"
    grid: tuple[int, int, int]
    pixels: pb.NamedTensor

    @classmethod
    def of(cls, message: pb.Patches, config: Config) -> Patches:
        """The tensors, by their names. Raises ServiceError or PlanError for those that are not one item's."""
        tensors = {tensor.name: tensor for tensor in message.tensors}
        names = next((names for names in PATCH_TENSORS if tensors.keys() == set(names)), None)
        if names is None or len(tensors) != len(message.tensors):
            found = ", ".join(tensor.name for tensor in message.tensors) or "none"
            wanted = ", or ".join(" and ".join(names) for names in PATCH_TENSORS)
            raise invalid(f"the tensors are {found}: send {wanted}, as the model's processor returns them")
        check_modality(PATCH_TENSORS[names], config)
        pixels, places = (_array(tensors[name]) for name in names)
        if pixels.dtype == np.int64:
            raise invalid(f"{names[0]} is int64: send float32, bfloat16, or uint8 pixel values")
        return cls(PATCH_TENSORS[names], _grid(names[1], places, pixels.shape), tensors[names[0]])

    def plan(self, planner: Planner, config: Config) -> ItemPlan:
        """See Media."""
        plan = planner.plan_patches(self.kind, self.grid, tuple(self.pixels.shape))
        check_pixels(self.kind, plan.height, plan.width, config)
        return check_plan(plan, config)

    def fill(self, planner: Planner, plan: ItemPlan, config: Config, out: Pixels, wanted: Callable[[], bool]) -> None:
        """See Media."""
        planner.fill_patches(_array(self.pixels), plan, out)


def _grid(name: str, places: npt.NDArray[np.generic], patches: tuple[int, ...]) -> tuple[int, int, int]:
    """What a tensor says of the grid of patches of this shape."""
    given = f"{name} is {places.dtype} {list(places.shape)}"
    if name.endswith("_grid_thw"):
        if places.dtype != np.int64 or places.shape not in ((3,), (1, 3)):
            raise invalid(f"{given}, must be int64 [3] or [1, 3]: send each image or video as an item of its own")
        t, h, w = places.reshape(3).tolist()
        return (t, h, w)
    if places.dtype != np.int64 or len(patches) != 3 or places.shape != (*patches[:2], 2):
        raise invalid(
            f"{given} for patches of shape {list(patches)}, must be int64 [frames, patches, 2] for [frames, patches, "
            "values]: send what the model's own processor returns for one item"
        )
    return grid_of(places.astype(np.int64, copy=False))


def read_header_size(header: bytes, config: Config) -> tuple[int, int]:
    """Size of an image from the first bytes of its file. Raises NeedMoreData for too few, MediaError."""
    if is_video(header):
        raise invalid("the header of a video file does not say enough: give its frames, fps, height and width")
    return read_size(header, max_pixels=config.max_image_pixels)


def _size_of(image: pb.EncodedImage | pb.RawImage, config: Config) -> tuple[int, int]:
    data = image.data
    if isinstance(image, pb.EncodedImage):
        if not data:
            raise MediaError("the image file is empty, it has no bytes: send one that has some")
        return read_size(data, max_pixels=config.max_image_pixels)
    expected = image.height * image.width * 3
    if not expected or len(data) != expected:
        raise MediaError(
            f"the raw image has {len(data)} bytes, {image.height} x {image.width} x 3 are {expected}: "
            "send rows of red, green, blue without padding, each side at least 1"
        )
    return image.height, image.width


def _pixels_of(image: pb.EncodedImage | pb.RawImage, config: Config) -> Pixels:
    if isinstance(image, pb.RawImage):
        return np.frombuffer(image.data, np.uint8).reshape(image.height, image.width, 3)
    return decode(image.data, max_pixels=config.max_image_pixels, background=config.alpha_background)


def _array(tensor: pb.NamedTensor) -> npt.NDArray[np.generic]:
    """The values of a tensor, read-only."""
    dtype, shape = TENSOR_DTYPES.get(tensor.dtype), tuple(tensor.shape)
    if dtype is None:
        raise invalid(f"{tensor.name} is of dtype {tensor.dtype}: send one of {', '.join(TENSOR_DTYPES)}")
    data, expected = tensor.data, math.prod(shape) * dtype.itemsize
    if not expected or len(data) != expected:
        raise invalid(
            f"{tensor.name} has {len(data)} bytes, {tensor.dtype} {list(shape)} are {expected}: send little-endian "
            "values in C order, no axis empty"
        )
    return np.frombuffer(data, dtype).reshape(shape)


def _while(wanted: Callable[[], bool], frames: Iterator[Pixels]) -> Iterator[Pixels]:
    for frame in frames:
        if not wanted():
            raise Abandoned
        yield frame
