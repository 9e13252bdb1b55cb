"""What the last seconds say of the next ones, with a clock of the test's own."""

from __future__ import annotations

import pytest

from opticnerve_server.pace import ENOUGH, WINDOW_S, Pace


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> Pace:
    pace = Pace(clock)
    pace.batch_tokens, pace.batch_items = 100, 4
    return pace


def measure(pace: Pace, preparing: float, computing: float, count: int = ENOUGH) -> None:
    for _ in range(count):
        pace.preparing.add(preparing)
        pace.computing.add(computing)


def test_too_few_measurements_say_nothing(pace: Pace) -> None:
    measure(pace, 1.0, 1.0, ENOUGH - 1)
    assert pace.time_to_answer(1000, 10, busy=False) is None
    pace.preparing.add(1.0)
    assert pace.time_to_answer(1000, 10, busy=False) is None, "every stage counts"
    pace.computing.add(1.0)
    assert pace.time_to_answer(1000, 10, busy=False) == 10.0


def test_old_measurements_say_nothing(pace: Pace, clock: Clock) -> None:
    measure(pace, 1.0, 1.0)
    clock.seconds += WINDOW_S
    assert pace.time_to_answer(100, 1, busy=False) == 2.0
    clock.seconds += 0.1
    assert pace.time_to_answer(100, 1, busy=False) is None


def test_a_few_that_are_slow_do_not_count(pace: Pace) -> None:
    measure(pace, 0.1, 0.2)
    for _ in range(ENOUGH - 1):
        pace.preparing.add(50.0)
        pace.computing.add(50.0)
    assert pace.time_to_answer(100, 1, busy=False) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("tokens", "items", "busy", "seconds"),
    [
        (10, 1, False, 1.5),  # prepared, then computed
        (100, 4, False, 1.5),
        (101, 4, False, 2.0),  # prepared while the first batch runs
        (10, 5, False, 2.0),  # items fill a batch too
        (10, 5, True, 1.5),  # of two batches one is nearly over
        (401, 1, False, 5.0),
        (401, 1, True, 4.0),
        (50, 2, True, 1.5),  # itself is in one to come
    ],
)
def test_full_batches_ahead(pace: Pace, tokens: int, items: int, busy: bool, seconds: float) -> None:
    measure(pace, 0.5, 1.0)
    assert pace.time_to_answer(tokens, items, busy=busy) == seconds


def test_hints_follow_the_rate(pace: Pace, clock: Clock) -> None:
    assert pace.time_to_half(1000) == 1.0, "nothing is known yet"
    for _ in range(10):
        pace.drained(100)
        clock.seconds += 0.5
    assert pace.time_to_half(800) == pytest.approx(2.0)
    assert pace.time_to_half(1) == 0.1
    assert pace.time_to_half(10**6) == 5.0
