"""Equal items, the rows that are kept of them, and the leases on these."""

from __future__ import annotations

from books import DONE, PLAN, assert_empty, encoded, grants, keyed, ledger, reserve, submitted
from opticnerve_server.claims import Progress
from opticnerve_server.ledger import Ledger
from opticnerve_server.messages import (
    Failed,
    Found,
    Granted,
    GrantKind,
    Hold,
    LeasesEnded,
    Rows,
    Submit,
    TakeOver,
)
from opticnerve_server.slots import ALIGNMENT

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
