"""What the scheduler of vLLM is told, pass by pass: the store is a fake whose fetches end when a test says so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from opticnerve.errors import NotCachedError
from opticnerve.integrations.vllm.consumer import Consumer
from opticnerve.integrations.vllm.items import Load
from opticnerve.integrations.vllm.reference import Reference
from opticnerve.integrations.vllm.settings import Settings

WIDTH = 8
ROWS = 6
ITEM_BYTES = ROWS * WIDTH * 2
SERVER = "encoder:50051"


def uuid(index: int, fingerprint: str = "f") -> str:
    return Reference.of(bytes([index] * 32), fingerprint, "bfloat16").uuid


class FakeStore:
    """Keeps what it was asked; item `index` has offset 100 x `index`."""

    def __init__(self) -> None:
        self.fetches: list[tuple[int, str, int, int]] = []
        self.pending: dict[int, Future[int]] = {}
        self.discarded: list[tuple[int, int]] = []

    def fetch(self, reference: Reference, address: str, rows: int, width: int) -> Future[int]:
        index = reference.media.sha256[0]
        self.fetches.append((index, address, rows, width))
        self.pending[index] = Future()
        return self.pending[index]

    def discard(self, offset: int, nbytes: int) -> None:
        self.discarded.append((offset, nbytes))

    def arrive(self, *indices: int) -> None:
        for index in indices:
            self.pending.pop(index).set_result(100 * index)

    def refuse(self, index: int) -> None:
        self.pending.pop(index).set_exception(NotCachedError("not here", reason="NOT_CACHED"))


class House:
    """A consumer, its store and its clock."""

    def __init__(self, *, items: int = 10, networks: Sequence[str] = (), **settings: Any) -> None:
        extra = {"server": SERVER, "networks": networks, "cache_bytes": items * ITEM_BYTES, "timeout_s": 5, **settings}
        self.store = FakeStore()
        self.now = 0.0
        self.consumer = Consumer(Settings.of(extra), WIDTH, self.store, lambda: self.now)

    def step(self, *requests: Any, computed: int = 0) -> tuple[list[bool], dict[str, Load]]:
        """One pass as vLLM makes it: each request that may go on has its items allocated."""
        verdicts = []
        for request in requests:
            verdicts.append(self.consumer.ensure(request, computed))
            for feature in request.mm_features if verdicts[-1] else ():
                if self.consumer.has(feature.identifier):
                    self.consumer.allocated(feature.identifier)
        return verdicts, self.consumer.take_loads()


def feature(index: int | str, offset: int = 0, rows: int = ROWS, **data: Any) -> Any:
    """An item of a prompt; `data` beside its grid."""
    position = SimpleNamespace(offset=offset, length=rows, get_num_embeds=lambda: rows)
    identifier = uuid(index) if isinstance(index, int) else index
    return SimpleNamespace(
        identifier=identifier, mm_position=position, modality="image", data={"image_grid_thw": None, **data}
    )


def request(*features: Any, name: str = "a", params: Any = None) -> Any:
    return SimpleNamespace(request_id=name, mm_features=list(features), ec_transfer_params=params)


def test_a_request_waits_for_its_rows_and_loads_them() -> None:
    house = House()
    asking = request(feature(1), feature(2, offset=ROWS))
    assert house.step(asking) == ([False], {})
    assert house.store.fetches == [(1, SERVER, ROWS, WIDTH), (2, SERVER, ROWS, WIDTH)]
    house.store.arrive(1)
    assert house.step(asking) == ([False], {})
    house.store.arrive(2)
    loads = {uuid(index): Load(100 * index, ROWS, WIDTH, "bfloat16") for index in (1, 2)}
    assert house.step(asking) == ([True], loads)
    assert len(house.store.fetches) == 2
    assert house.consumer.take_unavailable() == set()


def test_a_second_request_fetches_nothing() -> None:
    house = House()
    first, second = request(feature(1)), request(feature(1), name="b")
    house.step(first, second)
    house.store.arrive(1)
    assert house.step(first, second)[0] == [True, True]
    house.consumer.loaded([uuid(1)])
    house.consumer.finished("a")
    house.consumer.finished("b")
    assert house.step(request(feature(1), name="c"))[0] == [True]
    assert len(house.store.fetches) == 1


def test_an_item_that_two_requests_load_in_one_step_is_confirmed_once() -> None:
    house = House(items=1)
    both = [request(feature(1), name=name) for name in "ab"]
    house.step(*both)
    house.store.arrive(1)
    assert len(house.step(*both)[1]) == 1
    house.consumer.loaded([uuid(1)])
    for name in "ab":
        house.consumer.finished(name)
    house.step(request(feature(2), name="c"))
    assert [index for index, *_ in house.store.fetches] == [1, 2]


def test_items_that_the_decoder_has_passed_are_not_fetched() -> None:
    house = House()
    asking = request(feature(1), feature(2, offset=ROWS))
    assert house.step(asking, computed=ROWS) == ([False], {})
    assert [index for index, *_ in house.store.fetches] == [2]
    assert house.step(request(feature(3), name="text"), computed=ROWS)[0] == [True]


def test_missing_rows_end_the_request_and_no_other() -> None:
    house = House()
    lost, fine = request(feature(1)), request(feature(2), name="b")
    house.step(lost, fine)
    house.store.refuse(1)
    house.store.arrive(2)
    assert house.step(lost, fine)[0] == [False, True]
    assert house.consumer.take_unavailable() == {"a"}
    assert house.consumer.take_unavailable() == set()
    assert house.step(lost)[0] == [False]  # until vLLM has ended it
    assert len(house.store.fetches) == 2
    house.consumer.finished("a")
    house.step(request(feature(1), name="c"))
    assert len(house.store.fetches) == 3  # the next may try anew


def test_all_who_wait_learn_of_a_failure() -> None:
    house = House()
    waiting = [request(feature(1), name=name) for name in "ab"]
    house.step(*waiting)
    house.store.refuse(1)
    assert house.step(*waiting)[0] == [False, False]
    assert house.consumer.take_unavailable() == {"a", "b"}


def test_a_failure_that_nobody_waited_for_is_forgotten() -> None:
    house = House()
    house.step(request(feature(1)))
    house.consumer.finished("a")  # it was cancelled
    house.store.refuse(1)
    assert house.step(request(feature(1), name="b"))[0] == [False]
    assert house.consumer.take_unavailable() == set()
    house.store.arrive(1)
    assert house.step(request(feature(1), name="b"))[0] == [True]


@pytest.mark.parametrize(
    ("identifier", "params", "settings"),
    [
        ("cat", None, {}),
        (uuid(1)[:-1], None, {}),
        (uuid(1, "other"), None, {"fingerprint": "f"}),
        (uuid(1), {uuid(1): {"address": "10.0.0.1:50051"}}, {"networks": ["10.1.0.0/16"]}),
        (uuid(1), {uuid(1): {"address": "evil.example:50051"}}, {}),
        (uuid(1), {uuid(1): {"address": 7}}, {}),
    ],
)
def test_what_cannot_be_fetched_ends_the_request(identifier: str, params: Any, settings: dict[str, Any]) -> None:
    house = House(**settings)
    assert house.step(request(feature(identifier), params=params))[0] == [False]
    assert house.consumer.take_unavailable() == {"a"}
    assert house.store.fetches == []


@pytest.mark.parametrize("params", [None, [], {uuid(1): None}, {uuid(1): {}}, {uuid(1): {"address": None}}])
def test_a_request_without_an_address_asks_the_configured_server(params: Any) -> None:
    house = House()
    house.step(request(feature(1), params=params))
    assert house.store.fetches == [(1, SERVER, ROWS, WIDTH)]


def test_a_request_names_the_address() -> None:
    house = House(networks=["10.0.0.0/8"])
    house.step(request(feature(1), params={uuid(1): {"address": "10.2.3.4:50051"}}))
    assert house.store.fetches[0][1] == "10.2.3.4:50051"


def test_a_prompt_with_other_rows_is_refused() -> None:
    house = House()
    first = request(feature(1))
    house.step(first)
    house.store.arrive(1)
    assert house.step(first, request(feature(1, rows=ROWS + 1), name="b"))[0] == [True, False]
    assert house.consumer.take_unavailable() == {"b"}


def test_one_uuid_twice_in_a_request_is_fetched_and_loaded_once() -> None:
    house = House()
    asking = request(feature(1), feature(1, offset=ROWS))
    house.step(asking)
    house.store.arrive(1)
    assert house.step(asking) == ([True], {uuid(1): Load(100, ROWS, WIDTH, "bfloat16")})
    assert len(house.store.fetches) == 1
    assert house.step(request(feature(2), feature(2, rows=3), name="b"))[0] == [False]
    assert house.consumer.take_unavailable() == {"b"}


def test_pixels_are_encoded_by_vllm_where_there_are_no_rows() -> None:
    house = House()
    asking = request(feature(1, pixel_values=None))
    assert house.step(asking)[0] == [False]
    house.store.refuse(1)
    assert house.step(asking) == ([True], {})
    assert house.step(asking) == ([True], {})
    assert len(house.store.fetches) == 1
    assert house.consumer.take_unavailable() == set()
    house.step(request(feature(1), name="b"))
    assert len(house.store.fetches) == 2


def test_ordinary_images_are_none_of_its_business() -> None:
    house = House()
    assert house.step(request(feature("9f1c", pixel_values=None))) == ([True], {})
    assert house.store.fetches == []


@pytest.mark.parametrize(("shape", "allowed"), [((6, 8), True), ((5, 8), False), ((6, 4), False), ((1, 6, 8), False)])
def test_inline_rows_must_fit(shape: tuple[int, ...], allowed: bool) -> None:
    house = House()
    rows = SimpleNamespace(data=SimpleNamespace(shape=shape))
    assert house.step(request(feature("any", image_embeds=rows)))[0] == [allowed]
    assert house.consumer.take_unavailable() == (set() if allowed else {"a"})


def test_the_time_is_up() -> None:
    house = House()
    asking = request(feature(1))
    house.step(asking)
    house.now = 5.0
    assert house.step(asking)[0] == [False]
    assert house.consumer.take_unavailable() == set()
    house.now = 5.1
    house.step(asking)
    assert house.consumer.take_unavailable() == {"a"}


def test_time_counts_from_when_it_waits() -> None:
    house = House(items=1)
    asking = request(feature(1), feature(2, offset=ROWS))
    house.step(asking, computed=2 * ROWS)
    house.now = 100.0  # it was preempted, and starts again
    assert house.step(asking, computed=ROWS)[0] == [False]
    house.store.arrive(2)
    assert house.step(asking, computed=ROWS)[0] == [True]


def test_rows_last_used_first_make_room() -> None:
    house = House(items=2)
    for index in (1, 2):
        house.step(request(feature(index)))
        house.store.arrive(index)
        house.step(request(feature(index)))
        house.consumer.loaded([uuid(index)])
        house.consumer.finished("a")
    house.step(request(feature(1)))  # used again
    house.consumer.loaded([uuid(1)])
    house.consumer.finished("a")
    house.step(request(feature(3)))
    assert house.store.discarded == [(200, ITEM_BYTES)]


def test_rows_that_are_needed_or_being_loaded_stay() -> None:
    house = House(items=1)
    first, second = request(feature(1)), request(feature(2), name="b")
    house.step(first)
    assert house.step(second)[0] == [False]
    assert len(house.store.fetches) == 1  # no room while 1 arrives
    house.store.arrive(1)
    house.step(first)
    house.consumer.finished("a")
    assert house.step(second)[0] == [False]  # the ranks have not confirmed
    assert house.store.discarded == []
    house.consumer.loaded([uuid(1)])
    house.step(second)
    assert house.store.discarded == [(100, ITEM_BYTES)]
    assert [index for index, *_ in house.store.fetches] == [1, 2]


def test_requests_never_hold_a_part_and_wait_for_the_rest() -> None:
    """Both need two of three places; whoever comes second holds none meanwhile."""
    house = House(items=3)
    first, second = (request(feature(n), feature(n + 1, offset=ROWS), name=str(n)) for n in (1, 3))
    house.step(first, second)
    assert [index for index, *_ in house.store.fetches] == [1, 2]
    house.store.arrive(1, 2)
    assert house.step(first, second)[0] == [True, False]
    house.consumer.loaded([uuid(1), uuid(2)])
    house.consumer.finished("1")
    house.step(second)
    house.store.arrive(3, 4)
    assert house.step(second)[0] == [True]


def test_more_than_the_cache_is_refused() -> None:
    house = House(items=1)
    house.step(request(feature(1), feature(2, offset=ROWS)))
    assert house.consumer.take_unavailable() == {"a"}
    assert house.store.fetches == []


def test_no_pass_takes_a_millisecond() -> None:
    """250 requests wait, of 4 items each. Others may have the core, so the median is timed, and work besides."""
    house = House(items=1000)
    names = [[Reference.of(bytes([n] * 31 + [k]), "f", "bfloat16").uuid for k in range(4)] for n in range(250)]
    requests = [
        request(*(feature(name, offset=k * ROWS) for k, name in enumerate(four)), name=str(n))
        for n, four in enumerate(names)
    ]
    walls, works = [], []
    for _ in range(5):
        for one in requests:
            wall, work = time.perf_counter(), time.thread_time()
            assert house.consumer.ensure(one, 0) is False
            walls.append(time.perf_counter() - wall)
            works.append(time.thread_time() - work)
    assert len(house.store.fetches) == 1000
    assert sorted(walls)[len(walls) // 2] < 1e-3
    assert sorted(works)[len(works) * 99 // 100] < 1e-3
