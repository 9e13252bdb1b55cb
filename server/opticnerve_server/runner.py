"""Runs batches so that only what cannot run fails, and knows whether the device works.

A launch that fails, for want of memory or with an exception, is nobody's fault yet: the sentinel is asked. If it fails
too, the batch ends, and the server is unhealthy until the sentinel runs again. Otherwise the parts run in halves of
halves, down to those that fail alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch

from . import metrics
from .dispatcher import Dispatcher
from .parts import Batch, Failure, Part
from .sentinel import Sentinel

log = logging.getLogger(__name__)

IDLE = float("inf")

SENTINEL_S = 30.0
"""So long after the device last computed, the sentinel does."""

NO_MEMORY = Failure("GPU_MEMORY", "the device has no memory for this item; retry later or send less at once", 1.0)
FAILED = Failure("INTERNAL", "the forward failed for this item; the server's log has the details")
UNHEALTHY = Failure("GPU_FAULT", "the device does not compute at present: retry on another server")


class DeviceBroken(RuntimeError):
    """The CUDA context is unusable: the process must end."""


class Runner:
    """Between scheduler and dispatcher. Everything but `computed` belongs to the device thread."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        sentinel: Sentinel,
        *,
        fail: Callable[[Part, Failure], None],
        free: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        """`fail` ends a part that will not run, `free` is told once for each batch that the device could take another,
        from any thread, and `changed` that `works` is another.
        """
        self._dispatcher = dispatcher
        self._sentinel = sentinel
        self._fail, self._free, self._changed = fail, free, changed
        self._started = 0  # batches that the device has not computed
        self._progress = threading.Condition()  # of that
        self._isolating = False  # what is computed is only a part of a batch
        self._active_at = time.monotonic()
        self.busy_since = IDLE
        """time.monotonic() since when the device has computed nothing of what it was given."""
        self.works = True
        """Whether the device computed the last time it was asked."""

    def land(self, part: Part) -> int:
        """`Dispatcher.land`; a part that finds no memory, though the cache was emptied for it, is marked as failed."""
        for _ in range(2):
            try:
                return self._dispatcher.land(part)
            except torch.OutOfMemoryError:
                log.warning("no memory for pixels", extra={"bytes": part.plan.pixel_bytes})
            self._clean_up()
        part.failure = NO_MEMORY
        return 0

    def run(self, batch: Batch) -> None:
        """Launch a batch whose parts have landed. Each part is reported by the dispatcher, or fails here.

        Raises DeviceBroken.
        """
        if not self.works and batch.parts:  # then nothing has been launched since
            self._ask_sentinel()
        if self.works:
            failure = self._attempt(batch)
            if failure is None:
                return
            self._settle()
            self._ask_sentinel()
        if self.works:
            self._isolating = True
            self._isolate(batch.parts)
            self._isolating = False
        else:
            for part in batch.parts:
                self._fail(part, UNHEALTHY)
        self._dispatcher.discard()
        self._free()

    def computed(self) -> None:
        """The device has computed a batch; on the finisher, or where there was nothing to compute."""
        if not self._isolating:
            self._free()
        self._end()  # last: what waits for it isolates then

    def idle(self) -> None:
        """Nothing has happened for about a second."""
        if self._started:
            return
        metrics.GPU_HEARTBEAT.set(time.time())
        if not self.works or time.monotonic() - self._active_at >= SENTINEL_S:
            self._ask_sentinel()

    def _attempt(self, batch: Batch) -> Failure | None:
        """Launch; why it failed. What a failed launch held is free when this returns, its pixels are not landed."""
        self._begin()
        try:
            self._dispatcher.run(batch)
            return None
        except torch.OutOfMemoryError as error:
            log.warning("no memory for a batch", extra={"parts": len(batch.parts), "error": str(error)})
            failure = NO_MEMORY
        except Exception:
            log.exception("batch failed", extra={"parts": len(batch.parts)})
            failure = FAILED
        # Not among the handlers: the frames of an exception that is being handled hold what the launch has allocated.
        self._clean_up()
        self._end()
        return failure

    def _isolate(self, parts: Sequence[Part]) -> None:
        """Run the parts of a failed batch in two halves, and so on; one that is alone already gets a second chance."""
        middle = len(parts) // 2
        for half in filter(None, (parts[:middle], parts[middle:])):
            failure = self._run_again(half)
            if failure is None:
                continue
            if len(half) > 1:
                self._isolate(half)
            else:
                self._fail(half[0], failure)

    def _run_again(self, parts: Sequence[Part]) -> Failure | None:
        """Land parts anew and run them; returns when they are computed, or why they failed.

        Landing blocks are reused two batches later, which is safe as long as only one batch is not computed yet.
        """
        self._dispatcher.discard()
        batch = Batch()
        for part in parts:
            part.landed_at = self.land(part)
            if part.failure is None:
                batch.parts.append(part)
            else:
                self._fail(part, part.failure)
        failure = self._attempt(batch)
        if failure is None:
            self._settle()
        return failure

    def _begin(self) -> None:
        with self._progress:
            if not self._started:
                self.busy_since = time.monotonic()
            self._started += 1

    def _end(self) -> None:
        now = time.monotonic()
        metrics.GPU_HEARTBEAT.set(time.time())
        with self._progress:
            self._started -= 1
            self._active_at, self.busy_since = now, now if self._started else IDLE
            self._progress.notify_all()

    def _settle(self) -> None:
        """Return when the device has computed all that it was given."""
        with self._progress:
            self._progress.wait_for(lambda: not self._started)

    def _ask_sentinel(self) -> None:
        """Find out whether the device, which has nothing else to compute, works, and tell if that is news."""
        self._begin()
        works = False
        try:
            self._sentinel.run()
            works = True
        except Exception:
            log.exception("the sentinel failed")
        if not works:
            self._clean_up()
        self._end()
        if works is not self.works:
            self.works = works
            self._changed()

    def _clean_up(self) -> None:
        """After a failure: let what still runs end, and give back memory that is cached. Raises DeviceBroken."""
        if device_is_broken():
            raise DeviceBroken("the device is broken")
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def device_is_broken() -> bool:
    """Whether the CUDA context is unusable: after a sticky error every call fails. Waits for what still runs."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
