"""A ledger without processes: what a front-end asks of it and what the device does to it, in one call each."""

from __future__ import annotations

from opticnerve_server.claims import Item, Progress
from opticnerve_server.ledger import Ledger
from opticnerve_server.messages import (
    Granted,
    GrantKind,
    ItemRequest,
    Refused,
    Reserve,
    Submit,
)
from opticnerve_server.slots import ALIGNMENT
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
