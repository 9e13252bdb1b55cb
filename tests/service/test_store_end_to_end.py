"""The store of a whole server, through the public client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import opticnerve
from opticnerve.errors import NotCachedError, StoreFullError
from opticnerve_server.bench import hits
from oracles import save_model
from running_server import RunningServer, running

CAT = Path(__file__).parents[2] / "deploy" / "demo" / "cat.png"
STORE_BYTES = 1 << 20
WIDTH = 384
"""Numbers of a row."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("store")
    save_model("qwen3_vl", directory / "model")
    with running(
        directory / "model",
        directory,
        "--token-budgets",
        "64,256",
        "--store-bytes",
        str(STORE_BYTES),
        "--frontends",
        "2",
    ) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[opticnerve.Client]:
    with opticnerve.Client(server.address, timeout=60) as client:
        yield client


def noise(seed: int, side: int = 224) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)


def test_fifty_callers_of_one_photograph_are_one_encode(server: RunningServer) -> None:
    before = server.total("opticnerve_dispatched_items_total")
    together = threading.Barrier(50)

    def call(_: int) -> opticnerve.Embedding:
        with opticnerve.Client(server.address, timeout=60) as client:
            client.info()
            together.wait()
            [embedding] = client.encode([CAT])
            return embedding

    with ThreadPoolExecutor(50) as pool:
        embeddings = list(pool.map(call, range(50)))
    assert server.total("opticnerve_dispatched_items_total") - before == 1
    assert [embedding.store_hit for embedding in embeddings].count(False) == 1
    assert len({embedding.crc32 for embedding in embeddings}) == 1
    assert server.total("opticnerve_store_lookups_total", result="miss") == 1


def test_a_hit_takes_neither_the_decoder_nor_the_device(client: opticnerve.Client) -> None:
    [miss], [hit] = ([*client.encode([noise(1)])] for _ in range(2))
    assert (miss.outcome, hit.outcome) == ("replay", "store")
    assert np.array_equal(miss.array.view(np.uint16), hit.array.view(np.uint16))
    assert hit.timings.preprocess == hit.timings.execute == 0 < miss.timings.execute


def test_equal_bytes_of_another_shape_are_another_item(client: opticnerve.Client) -> None:
    tall = np.full((256, 64, 3), 77, np.uint8)
    [upright], [lying] = ([*client.encode([pixels])] for pixels in (tall, tall.reshape(64, 256, 3)))
    assert upright.digest != lying.digest
    assert (upright.grid.h, upright.grid.w) == (lying.grid.w, lying.grid.h)
    assert not lying.store_hit
    assert not np.array_equal(upright.array, lying.array)


def test_a_file_that_has_changed_is_another_item(client: opticnerve.Client, tmp_path: Path) -> None:
    file, crcs = tmp_path / "picture.png", []
    for seed in (70, 71):
        Image.fromarray(noise(seed)).save(file)
        [embedding] = client.encode([file])
        assert not embedding.store_hit
        crcs.append(embedding.crc32)
    assert crcs[0] != crcs[1]


def test_held_rows_are_fetched_from_where_the_lease_says(client: opticnerve.Client) -> None:
    [held] = client.hold([noise(2)], ttl=30, reads=2)
    [expected] = client.encode([noise(2)])
    with opticnerve.Client(held.address, timeout=60) as decoder:
        for _ in range(2):
            [fetched] = decoder.encode([opticnerve.Digest(held.digest)])
            assert fetched.store_hit
            assert fetched.plan == expected.plan == held.plan
            assert fetched.array.tobytes() == expected.array.tobytes()
    assert client.release([held.digest]) == 0, "both reads were made"


def test_a_store_full_of_leases_says_so_and_streams_on(client: opticnerve.Client, server: RunningServer) -> None:
    [embedding] = client.encode([noise(3)])
    room = STORE_BYTES // (-(-embedding.array.nbytes // 4096) * 4096)
    held = [one for seed in range(room) for one in client.hold([noise(10 + seed)])]
    with pytest.raises(StoreFullError):
        client.hold([noise(10 + room)])
    [embedding] = client.encode([noise(4)])
    assert not embedding.store_hit
    with pytest.raises(NotCachedError):
        list(client.encode([opticnerve.Digest(embedding.digest)]))
    assert server.total("opticnerve_store_leased_bytes") <= STORE_BYTES
    assert client.release([one.digest for one in held]) == room


def test_a_working_set_larger_than_the_store_goes_on(client: opticnerve.Client, server: RunningServer) -> None:
    evicted = server.total("opticnerve_store_evictions_total")
    for _ in range(2):
        embeddings = list(client.encode([noise(seed) for seed in range(100, 116)]))
        assert len(embeddings) == 16
    assert server.total("opticnerve_store_evictions_total") > evicted
    assert server.total("opticnerve_store_bytes") <= STORE_BYTES


def test_the_bench_measures_hits_beside_misses(server: RunningServer) -> None:
    before = server.total("opticnerve_dispatched_items_total")
    seconds, row_bytes = hits.measure(server.address, [hits.jpeg(160, 224, seed) for seed in (1, 2)])
    assert server.total("opticnerve_dispatched_items_total") == before + 3, "one image to connect, two misses"
    assert [len(times) for times in seconds.values()] == [2, 2, 2]
    assert row_bytes == (160 // 32) * (224 // 32) * WIDTH * 2
    header, rule, *rows = hits.markdown({kind: [0.004, 0.001, 0.002] for kind in hits.CALLS}).splitlines()
    assert header.count("|") == rule.count("|")
    assert rows == [f"| {kind} | 2.00 | 4.00 | 1.0 |" for kind in hits.CALLS]
