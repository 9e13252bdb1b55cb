"""Planning and preparing items in threads: torch, Pillow, FFmpeg and hashing let go of the interpreter.

Two pools. Headers and plans have one of their own, so that no new call waits behind decodes; a few small images are
planned at once. Decoding has the other, at lower priority, so that the asyncio loop is never late; how far it may run
ahead of the device is bounded by the slots.
A video holds a thread until its last frame is in the slot, or until nobody waits for it any more.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Job
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from opticnerve.digests import digest_of
from opticnerve.v1 import encoder_pb2 as pb

from .config import MAX_QUEUE_ITEMS, Config
from .errors import ServiceError, internal_error
from .items import Media, media_of, read_header_size, sampling_of
from .limits import check_modality, invalid, plan_image, plan_video
from .media.decode import MediaError, NeedMoreData, read_size
from .models.base import PlanError, Planner, VideoItem
from .types import ItemPlan

HEADER_THREADS = 2
LIGHT_ITEMS, LIGHT_BYTES, LIGHT_HEADER, LIGHT_SIDE = 4, 128 << 10, 4 << 10, 8192
"""Calls of up to so many image files, in a request of up to so many bytes, are planned where they arrive if the sizes
stand in their first bytes, so many of all files together, and no side has more pixels: in 0.1 ms, or 2 if headers of
tiny segments were made to be slow. Waking a thread and being woken takes 0.4. A longer side could mean thousands of
crops.
"""

PLAN_RETRY_S = 0.1
"""When to try again after too much waited to be planned, which takes microseconds an image."""

DECODE_NICENESS = 10
"""Measured: with the decoders at this niceness the slowest health check under load fell from 160 to 50 ms."""

DIGEST_BYTES = 32

T = TypeVar("T")
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """An item that passed every check that needs no pixels. One that is but a digest has neither media nor plan."""

    index: int
    message: pb.Item
    digest: bytes
    media: Media | None
    plan: ItemPlan | None

    @property
    def sampling(self) -> bytes:
        """How its frames are to be chosen, as the wire has it; empty for the model's own way, and for images."""
        media = getattr(self.message, self.message.WhichOneof("media") or "digest")
        chosen = getattr(media, "sampling", None)
        return b"" if chosen is None else chosen.SerializeToString(deterministic=True)


@dataclass(frozen=True, slots=True)
class NeedBytes:
    """A header was too short: at least this many bytes from the start of the file are needed."""

    count: int


class Planning:
    """What waits to be planned or is planned, of one method. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items = 0
        self._lock = threading.Lock()

    def enter(self, items: int) -> None:
        """Count in the items of a call. Raises ServiceError over the limit."""
        with self._lock:
            if self._items + items > self._limit:
                raise ServiceError(
                    "QUEUE_FULL",
                    f"{self._items} items wait to be planned, with these {items} over the limit of {self._limit}: "
                    "retry later",
                    subject="planning",
                    retry_after=PLAN_RETRY_S,
                    metadata={"resource": "planning", "requested": items, "limit": self._limit},
                )
            self._items += items

    def leave(self, items: int) -> None:
        """Count them out."""
        with self._lock:
            self._items -= items


class Preprocessor:
    """The two pools. Thread-safe; `close` ends the threads, which nothing else should."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._items, self._sizes = Planning(config.max_queue_items), Planning(MAX_QUEUE_ITEMS)
        self._workers: list[threading.Thread] = []
        self._headers = ThreadPoolExecutor(HEADER_THREADS, "header", self._begin)
        self._decodes = ThreadPoolExecutor(config.preprocess_threads, "decode", self._begin, (DECODE_NICENESS,))

    def close(self) -> None:
        """Drop the waiting jobs and return when the running ones are done."""
        self._headers.shutdown(cancel_futures=True)
        self._decodes.shutdown(cancel_futures=True)

    def check(self) -> None:
        """Raise RuntimeError if a thread has died: its pool would go on with fewer, or take jobs and run none."""
        for worker in self._workers:
            if not worker.is_alive():
                raise RuntimeError(f"the worker thread {worker.name} has died")

    async def plan_items(
        self, planner: Planner, items: Sequence[pb.Item], request_bytes: int
    ) -> list[PlannedItem | ServiceError]:
        """For every item of an EncodeRequest its plan, or why it has none. Raises ServiceError QUEUE_FULL."""

        def plan(index: int, item: pb.Item) -> PlannedItem:
            return self._plan_item(planner, index, item)

        if request_bytes <= LIGHT_BYTES and len(items) <= LIGHT_ITEMS and self._are_light(items):
            return [_attempt(plan, index, item) for index, item in enumerate(items)]
        return await self._plan_all(self._items, items, plan)

    async def plan_sizes(
        self, planner: Planner, items: Sequence[pb.MediaSize]
    ) -> list[ItemPlan | NeedBytes | ServiceError]:
        """For every item of a PlanItemsRequest its plan, or why it has none. Raises ServiceError QUEUE_FULL."""
        return await self._plan_all(self._sizes, items, lambda _, item: self._plan_size(planner, item))

    def prepare(
        self, planner: Planner, planned: PlannedItem, out: npt.NDArray[np.uint8], wanted: Callable[[], bool]
    ) -> Job[None]:
        """A job that decodes and resizes into `out` [plan.pixel_bytes]. Raises ServiceError.

        Cancelled while it waits, it never runs. A video ends early, with items.Abandoned, once `wanted`, which is
        called from the job's thread, says no.
        """
        return self._decodes.submit(self._prepare, planner, planned, out, wanted)

    def _begin(self, niceness: int = 0) -> None:
        """On each thread, before its first job."""
        self._workers.append(threading.current_thread())
        if niceness:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)

    async def _plan_all(
        self, planning: Planning, items: Sequence[T], plan: Callable[[int, T], P]
    ) -> list[P | ServiceError]:
        """Plan in a thread, one item after the other until nobody waits for them any more."""
        abandoned = threading.Event()

        def attempt_all() -> list[P | ServiceError]:
            return [_attempt(plan, index, item) for index, item in enumerate(items) if not abandoned.is_set()]

        planning.enter(len(items))
        job = self._headers.submit(attempt_all)
        job.add_done_callback(lambda _: planning.leave(len(items)))
        try:
            return await asyncio.wrap_future(job)
        finally:
            abandoned.set()

    def _are_light(self, items: Sequence[pb.Item]) -> bool:
        """Whether all are image files whose sizes are among their first bytes and usual, or digests of some."""
        return all(self._is_light(item, LIGHT_HEADER // len(items)) for item in items)

    def _is_light(self, item: pb.Item, header_bytes: int) -> bool:
        if item.WhichOneof("media") != "encoded_image":
            return item.WhichOneof("media") == "digest"
        try:
            size = read_size(item.encoded_image.data[:header_bytes], max_pixels=self._config.max_image_pixels)
        except MediaError:
            return False
        return max(size) <= LIGHT_SIDE

    def _plan_item(self, planner: Planner, index: int, item: pb.Item) -> PlannedItem:
        if item.WhichOneof("media") == "digest":
            if len(item.digest.sha256) != DIGEST_BYTES:
                raise invalid(f"the digest has {len(item.digest.sha256)} bytes, a SHA-256 has {DIGEST_BYTES}")
            return PlannedItem(index, item, item.digest.sha256, None, None)
        media = media_of(item, self._config)
        plan = media.plan(planner, self._config)
        return PlannedItem(index, item, digest_of(item), media, plan)

    def _plan_size(self, planner: Planner, item: pb.MediaSize) -> ItemPlan | NeedBytes:
        match item.WhichOneof("source"):
            case "size":
                size = item.size
                check_modality("video" if size.frames else "image", self._config)
                if not size.frames:
                    return plan_image(planner, self._config, size.height, size.width)
                wanted = VideoItem(size.frames, size.fps, size.height, size.width, sampling_of(size.sampling))
                return plan_video(planner, self._config, wanted)
            case "header":
                check_modality("image", self._config)
                try:
                    height, width = read_header_size(item.header, self._config)
                except NeedMoreData as error:
                    return NeedBytes(error.need_bytes)
                return plan_image(planner, self._config, height, width)
            case _:
                raise invalid("the item has neither a size nor a header: set one")

    def _prepare(
        self, planner: Planner, planned: PlannedItem, out: npt.NDArray[np.uint8], wanted: Callable[[], bool]
    ) -> None:
        media, plan = planned.media, planned.plan
        assert media is not None, "a digest has no media to prepare"
        assert plan is not None
        try:
            media.fill(planner, plan, self._config, out, wanted)
        except (MediaError, PlanError) as error:
            raise invalid(str(error)) from error


def _attempt(plan: Callable[[int, T], P], index: int, item: T) -> P | ServiceError:
    """The plan of an item, or why it has none."""
    try:
        return plan(index, item)
    except ServiceError as error:
        return error
    except (MediaError, PlanError) as error:
        return invalid(str(error))
    except Exception as error:
        return internal_error(error)
