"""The soak itself: a short one passes, and what it must notice it notices."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from opticnerve.tensors import Embedding, Grid, ItemPlan, Timings
from opticnerve_server import cli
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.soak import KINDS, Sample, Soak, Wrong, bomb


def test_a_short_soak_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint("qwen3_vl", tmp_path / "model", 0)
    settings = ["--model", str(tmp_path / "model"), "--device", "cpu", "--token-budgets", "64,256"]
    # A store that holds a few images only, so that rows come and go.
    code = cli.main(["soak", *settings, "--store-bytes", "3000000", "--calls", "90", "--concurrency", "12"])
    verdict = json.loads(capsys.readouterr().out)
    assert code == 0, verdict
    assert verdict["passed"]
    assert verdict["calls"] == 180, "as many before as it warms up"
    kinds = {outcome.partition(":")[0] for outcome in verdict["outcomes"]}
    assert kinds == set(KINDS), "each kind was drawn"


def soak_with(rows: np.ndarray) -> tuple[Soak, Sample]:
    sample = Sample(b"", (8, 8), rows)
    return Soak("", [sample], 1e-5, random.Random(0)), sample


def embedding(array: np.ndarray) -> Embedding:
    plan = ItemPlan(Grid(1, 2, 2), 2, 8, 8, 4, (), (), (), 0.0)
    return Embedding(array, 8, plan, b"", 0, (), Timings(0, 0, 0, 0, 0, 0), False, "", True)


@pytest.mark.parametrize("change", [1.0001, np.nan, -1.0])
def test_wrong_rows_are_noticed(change: float) -> None:
    rows = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    soak, sample = soak_with(rows)
    soak._check(sample, embedding(rows))
    with pytest.raises(Wrong, match="off by"):
        soak._check(sample, embedding((rows * change).astype(np.float32)))
    with pytest.raises(Wrong, match="were expected"):
        soak._check(sample, embedding(rows[:3]))


async def test_any_other_failure_is_part_of_the_verdict() -> None:
    soak, _ = soak_with(np.zeros((4, 8), np.float32))

    class Broken:
        async def plan(self, sizes: object) -> None:
            raise ConnectionError("no server")

    await soak._call("planned", Broken())  # type: ignore[arg-type]
    assert soak.wrong == ["planned: ConnectionError: no server"]
    assert soak.calls == {"planned: WRONG": 1}


def test_the_bomb_is_one() -> None:
    import io

    from PIL import Image

    assert len(bomb()) < 1000
    Image.MAX_IMAGE_PIXELS, limit = None, Image.MAX_IMAGE_PIXELS
    try:
        assert Image.open(io.BytesIO(bomb())).size == (40_000, 40_000)
    finally:
        Image.MAX_IMAGE_PIXELS = limit
