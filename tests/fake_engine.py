"""The engine's end of a front-end's socket, without a tower: grants slots, answers with rows made from the pixels."""

from __future__ import annotations

import os
import threading
import zlib
from collections import Counter

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt

from opticnerve_server import messages
from opticnerve_server.claims import Item, Notice, Progress
from opticnerve_server.ledger import Ledger
from opticnerve_server.messages import (
    EndLeases,
    Failed,
    Grant,
    Granted,
    GrantKind,
    Occupancy,
    Refused,
    Release,
    Reserve,
    Rows,
    Slot,
    Submit,
    TooLate,
)
from opticnerve_server.slots import Arena, SlotAllocator
from opticnerve_server.types import Dispatched, Outcome

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
POISON = 0xA5


def rows_of(pixels: npt.NDArray[np.uint8], tokens: int, width: int, dtype: str) -> npt.NDArray[np.generic]:
    """Rows [tokens, width] that depend on every pixel and are the same in every process."""
    random = np.random.default_rng(zlib.crc32(pixels.tobytes()))
    return random.standard_normal((tokens, width), np.float32).astype(DTYPES[dtype])


class FakeEngine:
    """A thread. Switches may be set at any time; what it held back while one was on is answered by `resume`.

    `check` asserts what a front-end owes: every granted slot released, once, and nothing touched after that.
    """

    def __init__(self, width: int = 32, size: int = 32 << 20) -> None:
        self.frontend_end, self._socket = messages.socket_pair()
        self.arena_fd = Arena.create(size)
        self.arena = Arena(self.arena_fd, size)
        self.size = size
        self.width = width
        self.hold_grants = False
        self.hold_rows = False
        self.refuse: Refused | TooLate | None = None  # its call number is replaced
        self.fail: dict[int, Failed] = {}  # by index; the call number is replaced
        self.part_rows = 1 << 30  # rows after which an item's next part begins
        self.fail_after_parts = False  # only the last part of an item in `fail` fails
        self.held: list[Reserve | Submit] = []
        self.reserved: list[Reserve] = []
        self.submitted: list[Submit] = []
        self.released: list[tuple[int, int]] = []
        self.slots: dict[tuple[int, int], Slot] = {}
        self.faults: list[str] = []
        self._allocator = SlotAllocator(size)
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Turn the holding switches off and answer what was held."""
        with self._lock:
            self.hold_grants = self.hold_rows = False
            held, self.held = self.held, []
            for message in held:
                self._handle(message)

    def die(self) -> None:
        """What a front-end sees of a killed engine."""
        self._socket.shutdown(2)
        self._thread.join(5)
        self.slots.clear()

    def check(self) -> None:
        assert not self.faults
        assert not self.slots, f"never released: {sorted(self.slots)}"
        assert len(set(self.released)) == len(self.released)

    def close(self) -> None:
        self.die()
        self._socket.close()
        os.close(self.arena_fd)

    def _run(self) -> None:
        while data := self._socket.recv(messages.MAX_MESSAGE_BYTES):
            with self._lock:
                self._handle(messages.decode(data))

    def _handle(self, message: messages.Message) -> None:
        match message:
            case Reserve() if self.refuse is not None:
                self._send(msgspec.structs.replace(self.refuse, call=message.call))
            case Reserve() if self.hold_grants:
                self.held.append(message)
            case Reserve():
                self.reserved.append(message)
                self._grant(message)
            case Submit() if self.hold_rows:
                self.held.append(message)
            case Submit():
                self._answer(message)
            case Release():
                self._release(message)

    def _grant(self, message: Reserve) -> None:
        grants = []
        for index, item in zip(message.indices, message.items, strict=True):
            if item.fetch:
                grants.append(Grant(GrantKind.MISSING, Slot(0, 0, 0)))
                continue
            start = self._allocator.allocate(item.pixel_bytes + item.row_bytes)
            assert start is not None, "the test's arena is too small"
            end = start + item.pixel_bytes + item.row_bytes
            self.arena.bytes[start:end] = POISON
            slot = Slot(start, start + item.pixel_bytes, end)
            grants.append(Grant(GrantKind.ENCODE, slot))
            self.slots[message.call, index] = slot
        self._send(Granted(message.call, grants))

    def _answer(self, message: Submit) -> None:
        slot = self.slots.get((message.call, message.index))
        if slot is None:
            return  # released while it was held
        self.submitted.append(message)
        failed = self.fail.get(message.index)
        if failed is not None:
            failed = Failed(message.call, message.index, failed.reason, failed.message, failed.retry_after)
            if not self.fail_after_parts:
                self._send(failed)
                return
        pixels = self.arena.bytes[slot.pixels : slot.pixels + message.plan.pixel_bytes]
        rows = rows_of(pixels, message.plan.tokens, self.width, message.dtype)
        self.arena.bytes[slot.rows : slot.rows + rows.nbytes] = rows.reshape(-1).view(np.uint8)
        for start in range(0, message.plan.tokens, self.part_rows):
            count = min(self.part_rows, message.plan.tokens - start)
            if failed is not None and start + count == message.plan.tokens:
                self._send(failed)
                return
            dispatched = Dispatched("default", Outcome.HIT, 64, count, 1, count)
            self._send(Rows(message.call, message.index, start, count, [dispatched], 0.001, 0.002, 0.003))

    def _release(self, message: Release) -> None:
        key = message.call, message.index
        self.released.append(key)
        slot = self.slots.pop(key, None)
        if slot is None:
            self.faults.append(f"released what it does not have: {key}")
            return
        self.arena.bytes[slot.pixels : slot.end] = POISON
        self._allocator.release(slot.pixels, slot.end - slot.pixels)

    def _send(self, message: messages.ToFrontend) -> None:
        self._socket.send(messages.encode(message))


class SharingEngine(FakeEngine):
    """With the real ledger and its store behind it; `grants` counts by kind what was granted."""

    def __init__(self, width: int = 32, size: int = 32 << 20) -> None:
        self.ledger = Ledger(max_items=64, max_tokens=1 << 20, max_bytes=size // 2, store_bytes=size // 2)
        self.grants: Counter[GrantKind] = Counter()
        self._items: dict[tuple[int, int], Item] = {}
        super().__init__(width, size)

    def check(self) -> None:
        super().check()
        assert self.ledger.occupancy() == Occupancy(0, 0, 0)

    def _grant(self, message: Reserve) -> None:
        notices = self.ledger.reserve(0, message)
        granted = notices[0][1]
        assert isinstance(granted, Granted), granted
        for index, grant in zip(message.indices, granted.grants, strict=True):
            self.grants[grant.kind] += 1
            if grant.kind in (GrantKind.ENCODE, GrantKind.WAIT):
                self.slots[message.call, index] = grant.slot
        self._tell(notices)

    def _answer(self, message: Submit) -> None:
        item = self._items.pop((message.call, message.index), None)
        if item is None:
            item, notices = self.ledger.submit(0, message)
            self._tell(notices)
            if item is None:
                return
            self.submitted.append(message)
        if self.hold_rows:
            self._items[message.call, message.index] = item
            self.held.append(message)
            return
        if not self.ledger.to_device(item):
            return
        slot, plan = item.slot, message.plan
        pixels = self.arena.bytes[slot.pixels : slot.pixels + plan.pixel_bytes]
        rows = rows_of(pixels, plan.tokens, self.width, item.dtype)
        self.arena.bytes[slot.rows : slot.end] = rows.reshape(-1).view(np.uint8)
        self._tell(self.ledger.from_device(item, Progress(0, plan.tokens, [])))

    def _release(self, message: Release) -> None:
        key = message.call, message.index
        self.released.append(key)
        if self.slots.pop(key, None) is None:
            self.faults.append(f"released what it does not have: {key}")
        self._tell(self.ledger.release(0, *key, message.served))

    def _handle(self, message: messages.Message) -> None:
        match message:
            case Submit():
                self._answer(message)  # the ledger hears of it at once, the rows may wait
            case EndLeases():
                self._tell(self.ledger.end_leases(0, message.call, message.names))
            case _:
                super()._handle(message)

    def _tell(self, notices: list[Notice]) -> None:
        for _, message in notices:
            self._send(message)
