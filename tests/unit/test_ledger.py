"""Admission in the engine: bounds, all or none, owners of slots, and nothing lost whatever the order of events."""

import itertools
import random

from opticnerve_server.ledger import Item, Ledger
from opticnerve_server.messages import Granted, ItemRequest, Refused, Reserve, Submit
from opticnerve_server.slots import ALIGNMENT, SlotAllocator
from opticnerve_server.types import ItemPlan

PLAN = ItemPlan("image", 4, 4, (1, 1, 1), 1, 1, {}, ())


def reserve(call: int, count: int, tokens: int = 10, nbytes: int = ALIGNMENT) -> Reserve:
    return Reserve(call, list(range(count)), [ItemRequest(tokens, 0, nbytes // 2, nbytes // 2)] * count)


def ledger(items: int = 8, tokens: int = 1000, pages: int = 16) -> Ledger:
    return Ledger(max_items=items, max_tokens=tokens, max_bytes=pages * ALIGNMENT)


def submitted(ledger: Ledger, call: int, index: int = 0) -> Item:
    item = ledger.submit(0, Submit(call, index, PLAN, "bfloat16", 1e9))
    assert item is not None
    return item


def test_slots_of_a_call_are_disjoint_and_inside() -> None:
    granted = ledger().reserve(0, reserve(1, 4))
    assert isinstance(granted, Granted)
    ranges = sorted((slot.start, slot.end) for slot in granted.slots)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))
    assert all(slot.start < slot.rows < slot.end <= 16 * ALIGNMENT for slot in granted.slots)


def test_each_resource_is_bounded() -> None:
    cases = {
        "items": (ledger(items=3), reserve(1, 2)),
        "tokens": (ledger(tokens=25), reserve(1, 1, tokens=20)),
        "bytes": (ledger(pages=3), reserve(1, 1, nbytes=2 * ALIGNMENT)),
    }
    for resource, (books, message) in cases.items():
        assert isinstance(books.reserve(0, message), Granted)
        refused = books.reserve(1, message)
        assert isinstance(refused, Refused), resource
        assert refused.resource == resource
        assert refused.retry_after is not None
        assert refused.retry_after > 0


def test_a_call_larger_than_the_house_is_refused_for_good() -> None:
    refused = ledger(items=3).reserve(0, reserve(1, 4))
    assert refused == Refused(1, "items", 4, 3, retry_after=None)


def test_a_refused_call_takes_nothing() -> None:
    books = ledger(pages=4)
    books.reserve(0, reserve(1, 3))
    assert isinstance(books.reserve(0, reserve(2, 2)), Refused)
    assert books.occupancy().items == 3
    assert isinstance(books.reserve(0, reserve(3, 1)), Granted)


def test_release_frees_at_once_but_not_under_the_device() -> None:
    books = ledger()
    books.reserve(0, reserve(1, 2))
    books.release(0, 1, 0)
    assert books.occupancy().items == 1
    item = submitted(books, 1, 1)
    assert books.to_device(item)
    books.release(0, 1, 1)
    assert books.occupancy().items == 1
    assert not books.from_device(item, 1)
    assert books.occupancy().items == 0


def test_a_released_item_never_reaches_the_device() -> None:
    books = ledger()
    books.reserve(0, reserve(1, 1))
    item = submitted(books, 1)
    books.release(0, 1, 0)
    assert not books.to_device(item)
    assert books.occupancy().items == 0


def test_a_dead_front_end_loses_its_own_items_only() -> None:
    books = ledger()
    books.reserve(0, reserve(1, 2))
    books.reserve(1, reserve(1, 2))
    running = submitted(books, 1, 0)
    books.to_device(running)
    assert books.disconnect(0) == 2
    assert books.occupancy().items == 3
    books.from_device(running, 1)
    assert books.occupancy().items == 2


def test_messages_for_unknown_items_are_ignored() -> None:
    books = ledger()
    books.release(0, 9, 9)
    assert books.submit(0, Submit(9, 9, PLAN, "bfloat16", 0.0)) is None


def test_any_order_of_events_returns_everything() -> None:
    rng = random.Random(7)
    books = ledger(items=40, tokens=10_000, pages=64)
    inside: list[tuple[int, int]] = []
    running: list[Item] = []
    for call in range(3000):
        granted = books.reserve(0, reserve(call, rng.randint(1, 5), nbytes=rng.randint(2, 4 * ALIGNMENT)))
        if isinstance(granted, Granted):
            inside += [(call, index) for index in range(len(granted.slots))]
        rng.shuffle(inside)
        for _ in range(rng.randint(0, 6)):
            if inside and rng.random() < 0.5:
                item = books.submit(0, Submit(*inside[-1], PLAN, "bfloat16", 0.0))
                if item is not None and books.to_device(item):
                    running.append(item)
            elif inside:
                books.release(0, *inside.pop())
            elif running:
                books.from_device(running.pop(), 1)
    for key in inside:
        books.release(0, *key)
    for item in running:
        books.from_device(item, 1)
    empty = books.occupancy()
    assert (empty.items, empty.tokens, empty.bytes) == (0, 0, 0)
    assert isinstance(books.reserve(0, reserve(-1, 1, nbytes=64 * ALIGNMENT)), Granted)


def test_the_allocator_never_overlaps_and_merges_again() -> None:
    rng = random.Random(3)
    allocator, taken = SlotAllocator(1 << 20), {}
    for _ in range(5000):
        if rng.random() < 0.55:
            size = rng.randint(1, 60_000)
            start = allocator.allocate(size)
            if start is not None:
                assert all(start + size <= s or s + n <= start for s, n in taken.items())
                taken[start] = size
        elif taken:
            start = rng.choice(list(taken))
            allocator.release(start, taken.pop(start))
    for start, size in taken.items():
        allocator.release(start, size)
    assert allocator.free_bytes == 1 << 20
    assert allocator.allocate(1 << 20) == 0
