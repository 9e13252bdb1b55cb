"""From media as callers send them to pixels in slots, in threads: torch, Pillow and hashing let go of the interpreter.

Two pools. Headers and plans have one of their own, so that no new call waits behind decodes. Decoding has the other, at
lower priority, so that the asyncio loop is never late; how far it may run ahead of the device is bounded by the slots.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Job
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from opticnerve.v1 import encoder_pb2 as pb

from .config import Config
from .errors import ServiceError, internal_error
from .media.decode import MediaError, NeedMoreData, decode, read_size
from .models.base import ImageItem, PlanError, Planner
from .types import ItemPlan

HEADER_THREADS = 2
DECODE_NICENESS = 10
"""Measured: with the decoders at this niceness the slowest health check under load fell from 160 to 50 ms."""

Image = pb.EncodedImage | pb.RawImage
T = TypeVar("T")
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class PlannedImage:
    """An image that passed every check that needs no pixels."""

    index: int
    image: Image
    plan: ItemPlan
    encoded_bytes: int


@dataclass(frozen=True, slots=True)
class NeedBytes:
    """A header was too short: at least this many bytes from the start of the file are needed."""

    count: int


class Preprocessor:
    """The two pools. Thread-safe; `close` ends the threads."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._headers = ThreadPoolExecutor(HEADER_THREADS, "header")
        self._decodes = ThreadPoolExecutor(config.preprocess_threads, "decode", initializer=_be_nice)

    def close(self) -> None:
        """Drop the waiting jobs and return when the running ones are done."""
        self._headers.shutdown(cancel_futures=True)
        self._decodes.shutdown(cancel_futures=True)

    async def plan_images(self, planner: Planner, items: Sequence[pb.Item]) -> list[PlannedImage | ServiceError]:
        """For every item of an EncodeRequest its plan, or why it has none."""
        return await self._plan_all(items, lambda index, item: self._plan_image(planner, index, item))

    async def plan_sizes(
        self, planner: Planner, items: Sequence[pb.MediaSize]
    ) -> list[ItemPlan | NeedBytes | ServiceError]:
        """For every item of a PlanItemsRequest its plan, or why it has none."""
        return await self._plan_all(items, lambda _, item: self._plan_size(planner, item))

    def prepare(self, planner: Planner, planned: PlannedImage, out: npt.NDArray[np.uint8]) -> Job[bytes]:
        """A job that decodes and resizes into `out` [plan.pixel_bytes]; its result is the digest. Raises ServiceError.

        Cancelled while it waits, it never runs.
        """
        return self._decodes.submit(self._prepare, planner, planned, out)

    async def _plan_all(self, items: Sequence[T], plan: Callable[[int, T], P]) -> list[P | ServiceError]:
        def attempt(index: int, item: T) -> P | ServiceError:
            try:
                return plan(index, item)
            except ServiceError as error:
                return error
            except (MediaError, PlanError) as error:
                return _invalid(str(error))
            except Exception as error:
                return internal_error(error)

        def attempt_all() -> list[P | ServiceError]:
            return [attempt(index, item) for index, item in enumerate(items)]

        return await asyncio.get_running_loop().run_in_executor(self._headers, attempt_all)

    def _plan_image(self, planner: Planner, index: int, item: pb.Item) -> PlannedImage:
        image = _image_of(item)
        data = image.data  # a copy: the message owns the bytes, and this one lives only as long as it is needed
        size = (
            _raw_size(image, len(data))
            if isinstance(image, pb.RawImage)
            else read_size(data, max_pixels=self._config.max_image_pixels)
        )
        return PlannedImage(index, image, self._plan(planner, *size), len(data))

    def _plan_size(self, planner: Planner, item: pb.MediaSize) -> ItemPlan | NeedBytes:
        match item.WhichOneof("source"):
            case "size" if item.size.frames:
                raise ServiceError("UNIMPLEMENTED", "videos are not built yet: leave frames at 0")
            case "size":
                return self._plan(planner, item.size.height, item.size.width)
            case "header":
                try:
                    size = read_size(item.header, max_pixels=self._config.max_image_pixels)
                except NeedMoreData as error:
                    return NeedBytes(error.need_bytes)
                return self._plan(planner, *size)
            case _:
                raise _invalid("the item has neither a size nor a header: set one")

    def _plan(self, planner: Planner, height: int, width: int) -> ItemPlan:
        limit = self._config.max_image_pixels
        if height * width > limit:
            raise _invalid(
                f"the image has {height} x {width} pixels, the limit is {limit} in all (max_image_pixels): "
                "send a smaller one",
                max_image_pixels=limit,
            )
        plan = planner.plan(ImageItem(height, width))
        most = self._config.max_item_tokens
        if most is not None and plan.tokens > most:
            raise ServiceError(
                "ITEM_TOO_LARGE",
                f"the item has {plan.tokens} tokens, the limit is {most} (max_item_tokens): send a smaller image",
                metadata={"tokens": plan.tokens, "max_item_tokens": most},
            )
        return plan

    def _prepare(self, planner: Planner, planned: PlannedImage, out: npt.NDArray[np.uint8]) -> bytes:
        image, data = planned.image, planned.image.data
        if isinstance(image, pb.RawImage):
            pixels = np.frombuffer(data, np.uint8).reshape(image.height, image.width, 3)
        else:
            try:
                pixels = decode(
                    data, max_pixels=self._config.max_image_pixels, background=self._config.alpha_background
                )
            except MediaError as error:
                raise _invalid(str(error)) from error
        planner.fill_pixels(pixels, planned.plan, out)
        return digest_of(image, data)


def digest_of(image: Image, data: bytes) -> bytes:
    """SHA-256 of the canonical image, see ItemStarted.digest; `data` are the bytes of `image`."""
    if isinstance(image, pb.RawImage):
        head = b"raw_image\0" + struct.pack("<II", image.height, image.width)
    else:
        head = b"encoded_image\0"
    digest = hashlib.sha256(head)
    digest.update(data)
    return digest.digest()


def _image_of(item: pb.Item) -> Image:
    match item.WhichOneof("media"):
        case "encoded_image":
            return item.encoded_image
        case "raw_image":
            return item.raw_image
        case None:
            raise _invalid("the item has no media: set encoded_image or raw_image")
        case kind:
            raise ServiceError("UNIMPLEMENTED", f"{kind} is not built yet: send encoded_image or raw_image")


def _raw_size(image: pb.RawImage, length: int) -> tuple[int, int]:
    expected = image.height * image.width * 3
    if not expected or length != expected:
        raise _invalid(
            f"the raw image has {length} bytes, {image.height} x {image.width} x 3 are {expected}: "
            "send rows of red, green, blue without padding, each side at least 1"
        )
    return image.height, image.width


def _invalid(message: str, **metadata: object) -> ServiceError:
    return ServiceError("IMAGE_INVALID", message, metadata=metadata)


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), DECODE_NICENESS)
