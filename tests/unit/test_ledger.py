"""Admission in the engine: bounds, all or none, owners of slots, and nothing lost whatever the order of events."""

import itertools
import random
import time

import msgspec

from opticnerve_server.claims import Item, Progress
from opticnerve_server.ledger import Ledger
from opticnerve_server.messages import (
    Failed,
    Found,
    Granted,
    GrantKind,
    Hold,
    ItemRequest,
    LeasesEnded,
    Refused,
    Reserve,
    Rows,
    Submit,
    TakeOver,
    TooLate,
)
from opticnerve_server.slots import ALIGNMENT, SlotAllocator
from opticnerve_server.types import ItemPlan

PLAN = ItemPlan("image", 4, 4, (1, 1, 1), 1, 10, {}, ())
DONE = Progress(0, 10, [])


def reserve(call: int, count: int, tokens: int = 10, pages: int = 1) -> Reserve:
    """A call whose items take `pages` pages of pixels, and as many of rows."""
    return Reserve(call, list(range(count)), [ItemRequest(tokens, 0, pages * ALIGNMENT, pages * ALIGNMENT)] * count)


def keyed(call: int, *keys: bytes, fetch: bool = False, **options: object) -> Reserve:
    size = 0 if fetch else ALIGNMENT
    items = [ItemRequest(0 if fetch else 10, 0, size, size, key, fetch) for key in keys]
    return Reserve(call, list(range(len(keys))), items, **options)  # type: ignore[arg-type]


def ledger(items: int = 8, tokens: int = 1000, pages: int = 16, store: int = 0) -> Ledger:
    return Ledger(max_items=items, max_tokens=tokens, max_bytes=pages * ALIGNMENT, store_bytes=store * ALIGNMENT)


def grants(books: Ledger, message: Reserve, frontend: int = 0) -> list[GrantKind]:
    (to, granted), *_ = books.reserve(frontend, message)
    assert to == frontend
    assert isinstance(granted, Granted), granted
    return [grant.kind for grant in granted.grants]


def refusal(books: Ledger, message: Reserve) -> Refused:
    ((_, refused),) = books.reserve(0, message)
    assert isinstance(refused, Refused), refused
    return refused


def submitted(books: Ledger, call: int, index: int = 0) -> Item:
    item, _ = books.submit(0, Submit(call, index, PLAN, "bfloat16"))
    assert item is not None
    return item


def encoded(books: Ledger, call: int, index: int = 0) -> Item:
    """Submit and run an item."""
    item = submitted(books, call, index)
    assert books.to_device(item)
    books.from_device(item, DONE)
    return item


def assert_empty(books: Ledger) -> None:
    empty = books.occupancy()
    assert (empty.items, empty.tokens, empty.bytes) == (0, 0, 0)


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


# --- equal items


def test_equal_items_are_encoded_once() -> None:
    books = ledger(store=4)
    assert grants(books, keyed(1, b"k", b"k")) == [GrantKind.ENCODE, GrantKind.WAIT]
    assert grants(books, keyed(2, b"k"), frontend=1) == [GrantKind.WAIT]
    assert books.submit(1, Submit(2, 0, PLAN, "bfloat16")) == (None, []), "its pixels are not this caller's to write"
    item = submitted(books, 1)
    books.to_device(item)
    told = books.from_device(item, DONE)
    assert [(to, said.call, said.index) for to, said in told if isinstance(said, Rows)] == [
        (0, 1, 0),
        (0, 1, 1),
        (1, 2, 0),
    ]
    assert books.occupancy().tokens == 10


def test_items_without_a_key_share_nothing() -> None:
    assert grants(ledger(), keyed(1, b"", b"")) == [GrantKind.ENCODE] * 2


def test_who_comes_between_two_parts_hears_of_both() -> None:
    books = ledger(store=4)
    grants(books, keyed(1, b"k"))
    item = submitted(books, 1)
    for start in (0, 4):
        books.to_device(item)
        if start:
            granted, first = books.reserve(1, keyed(2, b"k"))
            assert isinstance(granted[1], Granted)
            assert first == (1, Rows(2, 0, 0, 4, [], 0.0, 0.0, 0.0))
        told = books.from_device(item, Progress(start, 4 if not start else 6, []))
    assert (1, Rows(2, 0, 4, 6, [], 0.0, 0.0, 0.0)) in told


def test_rows_are_told_of_in_their_order_whatever_device_is_first() -> None:
    books = ledger()
    grants(books, reserve(1, 1))
    item = submitted(books, 1)
    parts = [Progress(start, count, []) for start, count in ((0, 2), (2, 3), (5, 5))]
    for _ in parts:
        assert books.to_device(item)
    assert books.from_device(item, parts[2]) == []
    assert not item.is_done
    assert [said.start for _, said in books.from_device(item, parts[0])] == [0]  # type: ignore[union-attr]
    assert [said.start for _, said in books.from_device(item, parts[1])] == [2, 5]  # type: ignore[union-attr]
    assert item.is_done


def test_another_caller_takes_over_what_the_first_leaves() -> None:
    books = ledger(store=4)
    grants(books, keyed(1, b"k"))
    grants(books, keyed(2, b"k", fetch=True))
    grants(books, keyed(3, b"k"), frontend=1)
    assert books.release(0, 1, 0) == [(1, TakeOver(3, 0))], "the one who has the media"
    item, told = books.submit(1, Submit(3, 0, PLAN, "bfloat16"))
    assert item is not None
    assert told == [(0, Found(2, 0, PLAN))]
    books.release(1, 3, 0)
    assert books.to_device(item), "it goes on for who is left"
    assert [said for _, said in books.from_device(item, DONE)] == [Rows(2, 0, 0, 10, [], 0.0, 0.0, 0.0)]


def test_nobody_with_the_media_is_left() -> None:
    books = ledger(store=4)
    grants(books, keyed(1, b"k"))
    grants(books, keyed(2, b"k", fetch=True), frontend=1)
    ((to, failed),) = books.release(0, 1, 0)
    assert to == 1
    assert isinstance(failed, Failed)
    assert failed.reason == "NOT_CACHED"
    assert grants(books, keyed(3, b"k")) == [GrantKind.ENCODE], "whoever comes now tries anew"
    books.release(1, 2, 0)
    books.release(0, 3, 0)
    assert_empty(books)


def test_a_failure_is_told_to_all_once_and_not_kept() -> None:
    books = ledger(store=4)
    grants(books, keyed(1, b"k"))
    grants(books, keyed(2, b"k"), frontend=1)
    item = submitted(books, 1)
    books.to_device(item)
    books.to_device(item)
    told = books.fail(item, "NON_FINITE_OUTPUT", "nan")
    reasons = [(to, said.reason) for to, said in told if isinstance(said, Failed)]
    assert reasons == [(frontend, "NON_FINITE_OUTPUT") for frontend in (0, 1)]
    assert books.fail(item, "NON_FINITE_OUTPUT", "nan") == []
    assert grants(books, keyed(3, b"k")) == [GrantKind.ENCODE]
    for frontend, call in ((0, 1), (1, 2), (0, 3)):
        books.release(frontend, call, 0)
    assert_empty(books)
    assert books.store.items == 0


# --- the store


def stored(books: Ledger, *keys: bytes) -> None:
    for key in keys:
        grants(books, keyed(99, key))
        encoded(books, 99)
        books.release(0, 99, 0, served=True)


def test_rows_are_found_again() -> None:
    books = ledger(store=4)
    stored(books, b"k")
    assert_empty(books)
    (_, granted), rows = books.reserve(0, keyed(1, b"k"))
    assert isinstance(granted, Granted)
    assert granted.grants[0].kind is GrantKind.WAIT
    assert rows == (0, Rows(1, 0, 0, 10, [], 0.0, 0.0, 0.0))
    (_, granted), found, rows = books.reserve(1, keyed(2, b"k", fetch=True))
    assert found == (1, Found(2, 0, PLAN))
    assert rows == (1, Rows(2, 0, 0, 10, [], 0.0, 0.0, 0.0))


def test_a_fetch_of_what_is_not_there_holds_nothing() -> None:
    books = ledger(store=4)
    assert grants(books, keyed(1, b"k", fetch=True)) == [GrantKind.MISSING]
    assert_empty(books)


def test_the_least_recently_used_go_first() -> None:
    books = ledger(store=2)
    stored(books, b"a", b"b")
    grants(books, keyed(1, b"a"))
    books.release(0, 1, 0, served=True)
    stored(books, b"c")
    kinds = grants(books, keyed(2, b"a", b"b", b"c", fetch=True))
    assert kinds == [GrantKind.WAIT, GrantKind.MISSING, GrantKind.WAIT]


def test_rows_that_are_read_do_not_go() -> None:
    books = ledger(store=1)
    stored(books, b"a")
    grants(books, keyed(1, b"a"))
    stored(books, b"b")
    assert grants(books, keyed(2, b"a", b"b", fetch=True)) == [GrantKind.WAIT, GrantKind.MISSING]
    books.release(0, 1, 0)
    books.release(0, 2, 0)
    stored(books, b"b")
    assert grants(books, keyed(3, b"a", b"b", fetch=True)) == [GrantKind.MISSING, GrantKind.WAIT]


def test_a_working_set_larger_than_the_store_goes_on() -> None:
    books = ledger(pages=4, store=3)
    for round_ in range(20):
        stored(books, *(bytes([key]) for key in range(7)))
        assert books.store.used_bytes <= 3 * ALIGNMENT
        assert_empty(books)
        assert round_ >= 0


def test_stored_rows_make_room_where_the_arena_is_in_pieces() -> None:
    books = ledger(pages=4, store=4)
    stored(books, b"a", b"b", b"c", b"d")
    assert grants(books, reserve(1, 1, pages=2)) == [GrantKind.ENCODE]


def test_a_call_never_drives_out_what_it_asks_for() -> None:
    books = ledger(pages=4, store=2)
    stored(books, b"a", b"b")
    message = keyed(1, b"a", b"b", b"c")
    assert grants(books, message) == [GrantKind.WAIT, GrantKind.WAIT, GrantKind.ENCODE]


# --- leases


def test_rows_under_a_lease_stay() -> None:
    books = ledger(store=2)
    grants(books, keyed(1, b"a", hold=Hold(60.0, 0)))
    encoded(books, 1)
    books.release(0, 1, 0)
    stored(books, b"b", b"c", b"d")
    assert grants(books, keyed(2, b"a", fetch=True)) == [GrantKind.WAIT]
    assert books.store.leased_bytes == ALIGNMENT


def test_a_lease_outlives_its_caller() -> None:
    books = ledger(store=2)
    grants(books, keyed(1, b"a", hold=Hold(60.0, 0)))
    item = submitted(books, 1)
    books.disconnect(0)
    assert books.to_device(item)
    books.from_device(item, DONE)
    assert_empty(books)
    assert grants(books, keyed(2, b"a", fetch=True)) == [GrantKind.WAIT]


def test_no_more_is_promised_than_the_store_holds() -> None:
    books = ledger(store=2)
    hold = Hold(60.0, 0)
    kinds = grants(books, keyed(1, b"a", b"b", b"c", b"a", hold=hold))
    assert kinds == [GrantKind.ENCODE, GrantKind.ENCODE, GrantKind.FULL, GrantKind.WAIT]
    assert grants(books, keyed(2, b"c")) == [GrantKind.ENCODE], "without a lease it is taken"


def test_leases_end_by_reads() -> None:
    books = ledger(store=1)
    grants(books, keyed(1, b"a", hold=Hold(60.0, 2)))
    encoded(books, 1)
    books.release(0, 1, 0)
    for call, served in ((2, True), (3, False), (4, True)):
        assert books.store.leased_bytes == ALIGNMENT
        grants(books, keyed(call, b"a", fetch=True))
        books.release(0, call, 0, served=served)
    assert books.store.leased_bytes == 0
    stored(books, b"b")
    assert grants(books, keyed(5, b"a", fetch=True)) == [GrantKind.MISSING]


def test_leases_end_by_time() -> None:
    books = ledger(store=1)
    now = [100.0]
    books.store.now = lambda: now[0]
    grants(books, keyed(1, b"a", hold=Hold(60.0, 0)))
    encoded(books, 1)
    books.release(0, 1, 0)
    grants(books, keyed(2, b"a", fetch=True, hold=Hold(90.0, 0)))
    books.release(0, 2, 0)
    for moment, left in ((159.0, 1), (161.0, 1), (191.0, 0)):
        now[0] = moment
        books.occupancy()
        assert books.store.leased_bytes == left * ALIGNMENT


def test_leases_end_when_asked() -> None:
    books = ledger(store=2)
    for call, seconds in ((1, 60.0), (2, 90.0)):
        grants(books, keyed(call, b"name1variant", hold=Hold(seconds, 0)))
    assert books.end_leases(3, 7, [b"name2"]) == [(3, LeasesEnded(7, 0))]
    for left in (1, 0, 0):
        ended = int(books.store.leased_bytes > 0)
        assert books.end_leases(3, 7, [b"name1", b"other"]) == [(3, LeasesEnded(7, ended))]
        assert books.store.leased_bytes == left * ALIGNMENT


def test_a_lease_that_ran_out_before_the_encode_frees_everything() -> None:
    books = ledger(store=1)
    now = [0.0]
    books.store.now = lambda: now[0]
    grants(books, keyed(1, b"a", hold=Hold(1.0, 0)))
    item = submitted(books, 1)
    books.disconnect(0)
    now[0] = 2.0
    assert_empty(books)
    assert not books.to_device(item)


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
