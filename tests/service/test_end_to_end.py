"""Photographs through the public client and a whole server: outcomes, number formats, a broken one, plans.

That rows are right shows `test_every_architecture.py`.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import opticnerve
from contract.test_frozen import METRICS
from running_server import Official

PHOTOGRAPHS = Path(__file__).parents[2] / "deploy" / "demo"
NAMES = ("cat.png", "coffee.webp", "astronaut.jpg", "rocket.jpg")
BUDGETS = (64, 256)


@pytest.fixture(scope="module")
def embeddings(official: Official) -> list[opticnerve.Embedding]:
    """The float32 rows of all photographs, from one call."""
    with opticnerve.Client(official.server.address, timeout=120) as client:
        return list(client.encode([PHOTOGRAPHS / name for name in NAMES], dtype="float32"))


def test_what_fits_a_budget_is_a_hit_and_the_rest_a_miss(
    official: Official, embeddings: list[opticnerve.Embedding]
) -> None:
    for embedding in embeddings:
        (dispatch,) = embedding.dispatches
        fits = embedding.tokens <= BUDGETS[-1]
        assert (embedding.outcome, dispatch.budget in BUDGETS) == (("replay", True) if fits else ("eager", False))
        assert dispatch.units == embedding.tokens <= dispatch.batch_units
        assert dispatch.batch_units <= dispatch.budget or not fits
    assert {embedding.outcome for embedding in embeddings} == {"replay", "eager"}
    assert official.server.total("opticnerve_dispatched_items_total", outcome="hit") > 0
    assert official.server.total("opticnerve_dispatched_items_total", outcome="miss") > 0


def test_a_scrape_shows_every_metric_with_its_labels(
    official: Official, embeddings: list[opticnerve.Embedding]
) -> None:
    families = {family.name: family for family in official.server.scrape()}
    assert {name for name in families if name.startswith("opticnerve_")} == set(METRICS)
    for name, (kind, labels) in METRICS.items():
        samples = families[name].samples
        assert (families[name].type, bool(samples)) == (kind, True), name
        assert {tuple(sorted(sample.labels.keys() - {"le"})) for sample in samples} == {tuple(sorted(labels))}
    stages = {sample.labels["stage"] for sample in families["opticnerve_stage_duration_seconds"].samples}
    assert stages == {"admit", "preprocess", "queue", "execute", "copy", "stream"}
    columns = {sample.labels.get("le") for sample in families["opticnerve_batch_tokens"].samples}
    assert {"64.0", "256.0"} < columns, "a column is a budget"
    assert sum(len(family.samples) for family in families.values()) < 600


@pytest.mark.parametrize(("dtype", "numpy"), [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)])
@pytest.mark.parametrize("name", ["cat.png", "rocket.jpg"])
def test_narrow_rows_are_the_wide_ones_rounded(official: Official, name: str, dtype: str, numpy: type) -> None:
    with opticnerve.Client(official.server.address, timeout=120) as client:
        [wide], [narrow] = (list(client.encode([PHOTOGRAPHS / name], dtype=kind)) for kind in ("float32", dtype))  # type: ignore[arg-type]
    assert wide.array.dtype == np.float32
    assert narrow.array.dtype == numpy
    assert narrow.array.tobytes() == wide.array.astype(numpy).tobytes()


def test_a_broken_photograph_fails_alone(official: Official) -> None:
    file = (PHOTOGRAPHS / "rocket.jpg").read_bytes()
    with opticnerve.Client(official.server.address, timeout=120) as client:
        items = [PHOTOGRAPHS / "cat.png", file[: len(file) // 2], file[1:], PHOTOGRAPHS / "astronaut.jpg"]
        first, truncated, garbage, last = client.encode(items, return_errors=True)
        [alone] = client.encode([PHOTOGRAPHS / "astronaut.jpg"])
    for index, error in ((1, truncated), (2, garbage)):
        assert isinstance(error, opticnerve.errors.ImageInvalidError)
        assert error.index == index
    assert isinstance(first, opticnerve.Embedding)
    assert isinstance(last, opticnerve.Embedding)
    assert last.digest == alone.digest == opticnerve.digest(PHOTOGRAPHS / "astronaut.jpg")


def test_plans_are_what_encode_answers(official: Official, embeddings: list[opticnerve.Embedding]) -> None:
    with opticnerve.Client(official.server.address, timeout=120) as client:
        plans = client.plan([PHOTOGRAPHS / name for name in NAMES])
        info = client.info()
    assert plans == [embedding.plan for embedding in embeddings]
    assert (info.architecture, list(info.paths[0].budgets)) == (official.architecture, list(BUDGETS))
    assert info.layout.hidden * (1 + info.layout.deepstack_levels) == embeddings[0].width
