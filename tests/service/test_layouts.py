"""One checkpoint served in either layout of its rows: behind the projector, and before it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import opticnerve
from oracles import llama4_adapter_rows, load_model, oracle_rows, save_model, tiled_media
from running_server import RunningServer, running
from towers import load_tower

SIZE = (60, 130)
HIDDEN, INNER = 24, 20
"""Widths of the tiny model's rows behind the projector and before it."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama4")
    save_model("llama4", directory)
    return directory


@pytest.fixture(scope="module")
def servers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, ...]]:
    """The second one by its variable."""
    first, second = (tmp_path_factory.mktemp(name) for name in ("projected", "unprojected"))
    with (
        running(checkpoint, first, "--token-budgets", "12") as projected,
        running(checkpoint, second, "--token-budgets", "12", OPTICNERVE_PROJECTOR="false") as unprojected,
    ):
        yield projected, unprojected


def test_each_says_its_layout_and_gives_its_rows(checkpoint: Path, servers: tuple[RunningServer, ...]) -> None:
    media = tiled_media(load_tower(checkpoint).planner, *SIZE, seed=0)
    image = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), dtype=np.uint8)  # that of `media`
    model = load_model(checkpoint)
    expected = oracle_rows(model, checkpoint, [media]), llama4_adapter_rows(model, [media])
    for server, rows, width, projected in zip(servers, expected, (HIDDEN, INNER), (True, False), strict=True):
        with opticnerve.Client(server.address, timeout=60) as client:
            info, (embedding,) = client.info(), client.encode([image], dtype="float32")
        assert (info.layout.hidden, info.layout.projector_applied) == (width, projected)
        assert embedding.array.shape == (media.plan.tokens, width)
        assert embedding.projector_applied == projected
        assert_near(embedding.array, rows.numpy())


def assert_near(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


def test_a_decoder_of_one_layout_is_refused_by_the_other(servers: tuple[RunningServer, ...]) -> None:
    fingerprints = []
    for server in servers:
        with opticnerve.Client(server.address, timeout=60) as client:
            fingerprints.append(client.info().fingerprint)
    assert fingerprints[0] != fingerprints[1]
    for server, fingerprint in zip(servers, reversed(fingerprints), strict=True):
        with (
            opticnerve.Client(server.address, timeout=60, fingerprint=fingerprint) as client,
            pytest.raises(opticnerve.errors.FingerprintMismatchError),
        ):
            list(client.encode([np.zeros((*SIZE, 3), np.uint8)]))
