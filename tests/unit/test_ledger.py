"""Admission in the engine: bounds, all or none, owners of slots, and nothing lost whatever the order of events."""

from __future__ import annotations

import itertools
import random
import time

import msgspec

from books import DONE, PLAN, assert_empty, encoded, grants, keyed, ledger, refusal, reserve, submitted
from opticnerve_server.claims import Item
from opticnerve_server.ledger import Ledger
from opticnerve_server.messages import (
    Granted,
    GrantKind,
    Hold,
    ItemRequest,
    Refused,
    Reserve,
    Rows,
    Submit,
    TooLate,
)
from opticnerve_server.slots import ALIGNMENT, SlotAllocator


def test_slots_of_a_call_are_disjoint_and_inside() -> None:
    ((_, granted),) = ledger().reserve(0, reserve(1, 4))
    assert isinstance(granted, Granted)
    slots = [grant.slot for grant in granted.grants]
    ranges = sorted(
        [(slot.pixels, slot.pixels + ALIGNMENT) for slot in slots] + [(slot.rows, slot.end) for slot in slots]
    )
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))
    assert ranges[-1][1] <= 16 * ALIGNMENT


def test_each_resource_is_bounded() -> None:
    cases = {
        "items": (ledger(items=3), reserve(1, 2)),
        "tokens": (ledger(tokens=25), reserve(1, 1, tokens=20)),
        "bytes": (ledger(pages=6), reserve(1, 1, pages=2)),
    }
    for resource, (books, message) in cases.items():
        grants(books, message)
        refused = refusal(books, message)
        assert refused.resource == resource
        assert refused.retry_after is not None
        assert refused.retry_after > 0


def test_a_call_larger_than_the_house_is_refused_for_good() -> None:
    assert refusal(ledger(items=3), reserve(1, 4)) == Refused(1, "items", 4, 3, retry_after=None)


def paced(books: Ledger, batch_s: float) -> None:
    """As if the device had worked at five full batches of two items of ten tokens, each prepared in no time."""
    books.batches_hold(tokens=20, items=2)
    for call in range(100, 105):
        grants(books, reserve(call, 1))
        encoded(books, call)
        books.release(0, call, 0)
        books.computed(batch_s)
    assert_empty(books)


def within(seconds: float, call: int, count: int = 1, **options: str) -> Reserve:
    return msgspec.structs.replace(reserve(call, count), deadline=time.monotonic() + seconds, **options)


def answer(books: Ledger, message: Reserve) -> type:
    ((_, said),) = books.reserve(0, message)
    return type(said)


def test_what_cannot_be_there_by_its_deadline_is_refused() -> None:
    books = ledger(items=100, pages=200)
    assert answer(books, within(0.001, 1)) is Granted, "nothing is known yet"
    books.release(0, 1, 0)
    paced(books, batch_s=100.0)
    assert answer(books, within(99, 2)) is TooLate
    assert_empty(books)
    assert answer(books, within(101, 3, 2)) is Granted
    ((_, late),) = books.reserve(0, within(199, 4))
    assert late == TooLate(4, 200.0, late.left_s)  # type: ignore[union-attr]
    assert 198 < late.left_s <= 199  # type: ignore[union-attr]
    assert answer(books, within(201, 5, 2)) is Granted
    assert answer(books, within(301, 6, 3)) is TooLate, "its own items fill two batches more"
    assert books.to_device(submitted(books, 3))
    assert answer(books, within(201, 7)) is Granted, "the batch on the device may be over in a moment"


def test_what_is_behind_a_call_does_not_make_it_late() -> None:
    books = ledger(items=1000, pages=2000)
    paced(books, batch_s=1.0)
    for call, count in ((1, 2), (2, 40)):
        assert answer(books, within(1000, call, count, tenant="a")) is Granted
    assert answer(books, within(20, 3, tenant="a")) is TooLate
    assert answer(books, within(2.5, 4, tenant="b")) is Granted, "it goes before the other tenant's second call"
    assert answer(books, within(1.5, 5, tenant="b")) is TooLate, "but not before its first"


def test_a_call_without_new_items_is_never_too_late() -> None:
    books = ledger(store=8)
    paced(books, batch_s=100.0)
    assert grants(books, keyed(1, b"k")) == [GrantKind.ENCODE]
    soon = time.monotonic() + 0.1
    assert grants(books, keyed(2, b"k", fetch=True, deadline=soon)) == [GrantKind.WAIT]
    assert grants(books, keyed(3, b"k", deadline=soon)) == [GrantKind.WAIT]
    assert grants(books, keyed(4, b"held", hold=Hold(60.0, 0))) == [GrantKind.ENCODE]
    assert answer(books, keyed(5, b"other", deadline=soon)) is TooLate


def test_a_refused_call_takes_nothing() -> None:
    books = ledger(pages=8)
    grants(books, reserve(1, 3))
    refusal(books, reserve(2, 2))
    assert books.occupancy().items == 3
    grants(books, reserve(3, 1))


def test_release_frees_at_once_but_not_under_the_device() -> None:
    books = ledger()
    grants(books, reserve(1, 2))
    books.release(0, 1, 0)
    assert books.occupancy().bytes == 2 * ALIGNMENT
    item = submitted(books, 1, 1)
    assert books.to_device(item)
    books.release(0, 1, 1)
    assert books.occupancy().bytes == 2 * ALIGNMENT
    assert books.from_device(item, DONE) == []
    assert_empty(books)


def test_pixels_are_free_once_the_rows_are_there() -> None:
    books = ledger()
    grants(books, reserve(1, 1))
    item = encoded(books, 1)
    assert books.occupancy().bytes == ALIGNMENT
    books.release(0, 1, 0)
    assert_empty(books)
    assert item.unwanted


def test_a_released_item_never_reaches_the_device() -> None:
    books = ledger()
    grants(books, reserve(1, 1))
    item = submitted(books, 1)
    books.release(0, 1, 0)
    assert not books.to_device(item)
    assert_empty(books)


def test_a_part_that_comes_back_unrun_may_run_again() -> None:
    books = ledger()
    grants(books, reserve(1, 1))
    item = submitted(books, 1)
    assert books.to_device(item)
    books.unrun(item)
    assert books.occupancy().device_tokens == 0
    assert books.to_device(item)
    assert [message for _, message in books.from_device(item, DONE)] == [Rows(1, 0, 0, 10, [], 0.0, 0.0, 0.0)]
    books.release(0, 1, 0)
    assert_empty(books)


def test_a_part_that_comes_back_unrun_for_nobody_frees_its_slot() -> None:
    books = ledger()
    grants(books, reserve(1, 1))
    item = submitted(books, 1)
    assert books.to_device(item)
    books.release(0, 1, 0)
    books.unrun(item)
    assert_empty(books)
    assert not books.to_device(item)


def test_a_dead_front_end_loses_its_own_items_only() -> None:
    books = ledger()
    grants(books, reserve(1, 2))
    grants(books, reserve(1, 2), frontend=1)
    running = submitted(books, 1, 0)
    books.to_device(running)
    assert books.disconnect(0) == (2, [])
    assert books.occupancy().items == 2
    assert books.occupancy().bytes == 6 * ALIGNMENT, "the device still uses one"
    books.from_device(running, DONE)
    assert books.occupancy().bytes == 4 * ALIGNMENT


def test_messages_for_unknown_items_are_ignored() -> None:
    books = ledger()
    assert books.release(0, 9, 9) == []
    assert books.submit(0, Submit(9, 9, PLAN, "bfloat16")) == (None, [])


def test_an_item_is_wanted_until_the_last_deadline() -> None:
    books = ledger(store=2)
    grants(books, keyed(1, b"k", deadline=10.0))
    grants(books, keyed(2, b"k", deadline=20.0))
    item = submitted(books, 1)
    assert books.is_wanted(item, 15.0)
    assert not books.is_wanted(item, 20.0)
    books.release(0, 2, 0)
    assert not books.is_wanted(item, 15.0)


# --- turns


def turn(books: Ledger, call: int, tenant: str, tokens: int = 10) -> tuple[float, int]:
    items = [ItemRequest(tokens, 0, 1, 1)]
    books.reserve(0, Reserve(call, [0], items, tenant=tenant))
    return submitted(books, call).order


def test_one_tenant_is_served_in_the_order_of_its_calls() -> None:
    books = ledger()
    orders = [turn(books, call, "a", tokens=50 - call) for call in range(5)]
    assert orders == sorted(orders)


def test_a_flood_of_one_tenant_does_not_starve_another() -> None:
    books = ledger(items=40, pages=100)
    flood = {turn(books, call, "a"): "a" for call in range(20)}
    late = {turn(books, 100 + call, "b"): "b" for call in range(3)}
    served = [tenant for _, tenant in sorted((flood | late).items())]
    assert served.index("b") <= 1
    assert served[:6].count("b") == 3


def test_a_flood_of_one_tenant_leaves_room_for_another() -> None:
    books = ledger(items=50, pages=1000)

    def take(call: int, tenant: str) -> bool:
        ((_, answer),) = books.reserve(0, Reserve(call, [0], [ItemRequest(1, 0, 1, 1)], tenant=tenant))
        assert isinstance(answer, Granted) or answer.retry_after, "it is a matter of time"  # type: ignore[union-attr]
        return isinstance(answer, Granted)

    assert sum(take(call, "a") for call in range(50)) == 40
    assert sum(take(100 + call, "b") for call in range(50)) == 8
    for call in range(40):
        books.release(0, call, 0)
    assert not books._shares._used_by.keys() - {"b"}
    assert sum(take(200 + call, "a") for call in range(50)) > 20
    assert sum(take(300 + call, "") for call in range(50)) > 0


def test_a_tenant_with_nothing_inside_may_take_all_that_is_free() -> None:
    message = Reserve(1, list(range(8)), [ItemRequest(1, 0, 1, 1)] * 8, tenant="a")
    grants(ledger(items=8), message)


def test_an_idle_tenant_saves_up_no_turns() -> None:
    books = ledger(items=100, pages=400)
    for call in range(20):
        turn(books, call, "a")
        item = books._claims[0, call, 0].item
        books.to_device(item)
    first_b, next_a, second_b = (turn(books, 50 + i, tenant) for i, tenant in enumerate("bab"))
    assert first_b < next_a <= second_b or first_b <= next_a < second_b


def test_any_order_of_events_returns_everything() -> None:
    rng = random.Random(7)
    books = ledger(items=40, tokens=10_000, pages=64, store=12)
    inside: list[tuple[int, int, int]] = []
    running: list[Item] = []
    for call in range(3000):
        frontend = rng.randint(0, 1)
        keys = [rng.choice([b"", b"a", b"b", b"c", b"d", b"e", b"f"]) for _ in range(rng.randint(1, 5))]
        hold = Hold(rng.choice([1e-6, 60.0]), rng.randint(0, 2)) if rng.random() < 0.1 and all(keys) else None
        items = [
            ItemRequest(0, 5, 0, 0, key, fetch=True)
            if rng.random() < 0.3
            else ItemRequest(10, 5, ALIGNMENT, (1 + (key > b"c")) * ALIGNMENT, key)
            for key in keys
        ]
        (_, granted), *_ = books.reserve(frontend, Reserve(call, list(range(len(keys))), items, hold=hold))
        if isinstance(granted, Granted):
            inside += [(frontend, call, i) for i, grant in enumerate(granted.grants) if grant.kind < GrantKind.MISSING]
        rng.shuffle(inside)
        for _ in range(rng.randint(0, 8)):
            event = rng.random()
            if inside and event < 0.35:
                at, number, index = inside[-1]
                item, _ = books.submit(at, Submit(number, index, PLAN, "bfloat16"))
                if item is not None and books.to_device(item):
                    running.append(item)
            elif inside and event < 0.75:
                books.release(*inside.pop(), served=rng.random() < 0.5)
            elif running and event < 0.95:
                books.from_device(running.pop(), DONE)
            elif running:
                books.fail(running.pop(), "INTERNAL", "")
            elif event > 0.995:
                books.disconnect(1)
                inside = [claim for claim in inside if claim[0] != 1]
        assert books.store.used_bytes <= 12 * ALIGNMENT
        assert books.store.leased_bytes <= 12 * ALIGNMENT
    for claim in inside:
        books.release(*claim)
    for item in running:
        books.from_device(item, DONE)
    assert_empty(books)
    books.end_leases(0, 0, [b""])
    while books.store.leased_bytes:
        books.end_leases(0, 0, [b""])
    while (kept := books.store.evict()) is not None:
        books._forget(kept)
    assert books.store.used_bytes == 0
    assert books._slots.free_bytes == 76 * ALIGNMENT
    assert not books._named
    assert not books._claims


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
