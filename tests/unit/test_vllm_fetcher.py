"""Rows from a server into memory that another process maps."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest

from fake_service import Abort, FakeService, Sleep, answer, failed, serving
from opticnerve.errors import NotCachedError, UnavailableError
from opticnerve.integrations.vllm import Reference, RowsError, memory
from opticnerve.integrations.vllm.fetcher import Fetcher
from opticnerve.integrations.vllm.memory import SharedMemory
from opticnerve.integrations.vllm.settings import Settings

ROWS, WIDTH = 6, 8
REFERENCE = Reference.of(bytes(range(32)), "fp", "bfloat16")


def some_rows(seed: int = 0, rows: int = ROWS) -> Any:
    return np.random.default_rng(seed).standard_normal((rows, WIDTH)).astype(ml_dtypes.bfloat16)


async def result(future: Future[int]) -> int:
    return await asyncio.wrap_future(future)


async def fetch(*scripts: Any, shape: tuple[int, int] = (ROWS, WIDTH)) -> tuple[FakeService, list[Any]]:
    """One fetch a script; what became of each: the rows as another process maps them, or the error."""
    service = FakeService(*scripts)
    outcomes: list[Any] = []
    async with serving(service) as address:
        fetcher = Fetcher(Settings(address, timeout_s=5))
        try:
            for _ in scripts:
                try:
                    offset = await result(fetcher.fetch(REFERENCE, address, *shape))
                except Exception as error:
                    outcomes.append(error)
                else:
                    mapped = memory.read(fetcher.path, offset, ROWS * WIDTH * 2)
                    outcomes.append(np.frombuffer(mapped, ml_dtypes.bfloat16).reshape(ROWS, WIDTH))
        finally:
            fetcher.close()
    return service, outcomes


async def test_rows_arrive_bit_equal_by_one_call_each() -> None:
    first, second = some_rows(1), some_rows(2)
    service, found = await fetch(lambda _: answer(0, first), lambda _: answer(0, second))
    for rows, expected in zip(found, (first, second), strict=True):
        assert rows.tobytes() == expected.tobytes()
    assert [request.items[0].digest.sha256 for request in service.encode_requests] == [bytes(range(32))] * 2
    assert {request.fingerprint for request in service.encode_requests} == {"fp"}


async def test_what_the_server_does_not_have() -> None:
    _, [error] = await fetch(lambda _: [failed(0, grpc.StatusCode.NOT_FOUND, "NOT_CACHED")])
    assert isinstance(error, NotCachedError)


async def test_rows_that_do_not_fit_or_are_not_finite() -> None:
    wrong = some_rows()
    wrong[3, 3] = np.nan
    _, found = await fetch(
        lambda _: answer(0, some_rows(rows=5)),
        lambda _: answer(0, some_rows()[:, :4].copy()),
        lambda _: answer(0, wrong),
    )
    assert [type(error) for error in found] == [RowsError] * 3
    assert "5 rows" in str(found[0])
    assert "NaN" in str(found[2])


async def test_a_server_that_is_down_and_comes_back() -> None:
    down = [lambda _: [Abort(grpc.StatusCode.UNAVAILABLE)]] * 12  # gRPC and the client try again
    service = FakeService(*down, lambda _: answer(0, some_rows()))
    async with serving(service) as address:
        fetcher = Fetcher(Settings(address, timeout_s=20))
        with pytest.raises(UnavailableError):
            await result(fetcher.fetch(REFERENCE, address, ROWS, WIDTH))
        service._scripts = service._scripts[-1:]
        assert await result(fetcher.fetch(REFERENCE, address, ROWS, WIDTH)) == 0
        fetcher.close()


async def test_closing_cancels_what_is_on_its_way() -> None:
    async with serving(FakeService(lambda _: [Sleep(30)])) as address:
        fetcher = Fetcher(Settings(address))
        future = fetcher.fetch(REFERENCE, address, ROWS, WIDTH)
        fetcher.close()
        assert future.cancelled()


def test_another_process_reads_what_was_put() -> None:
    shared = SharedMemory()
    shared.put(some_rows(1))
    offset = shared.put(some_rows(2))
    code = "import os, sys; file = os.open(sys.argv[1], os.O_RDONLY); os.write(1, os.pread(file, 96, int(sys.argv[2])))"
    done = subprocess.run([sys.executable, "-S", "-c", code, shared.path, str(offset)], capture_output=True, check=True)
    assert done.stdout == some_rows(2).tobytes() == memory.read(shared.path, offset, 96)[:]
    shared.close()


def test_freed_memory_goes_back() -> None:
    shared = SharedMemory()
    large = np.ones(10_000_000, np.uint8)
    offsets = [shared.put(large) for _ in range(3)]
    used = Path(shared.path).stat().st_blocks
    shared.free(offsets[1], large.nbytes)
    assert Path(shared.path).stat().st_blocks == pytest.approx(used * 2 / 3, rel=0.01)
    assert memory.read(shared.path, offsets[2], large.nbytes)[-1] == 1
    assert memory.read(shared.path, offsets[0], large.nbytes)[-1] == 1
    shared.close()


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"server": "a:1", "colour": 1},
        {"server": "a:1", "networks": ["10.0.0.1/8"]},
        {"server": "a:1", "timeout_s": 0},
        {"server": "a:1", "timeout_s": float("nan")},
        {"server": "a:1", "cache_bytes": 0},
        {"server": "a:1", "cache_bytes": "1 GiB"},
        {"server": "a:1", "token_file": "/nowhere/token"},
    ],
)
def test_settings_that_cannot_work(extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ec_connector_extra_config"):
        Settings.of(extra)


def test_settings(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    settings = Settings.of(
        {"server": "a:1", "token_file": str(tmp_path / "token"), "networks": ["10.0.0.0/8", "fd00::/8"]}
    )
    assert settings.token == "secret"
    assert "secret" not in repr(settings)
    assert settings.address_of("[fd00::1]:50051") == "[fd00::1]:50051"
    assert settings.address_of("a:1") == settings.address_of(None) == "a:1"
    for strange in ("[fe00::1]:50051", "a:2", "10.0.0.1", ""):
        with pytest.raises(ValueError, match="address"):
            settings.address_of(strange)
