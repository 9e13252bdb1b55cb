"""Every architecture end to end: a checkpoint on disk, a whole server, photographs in, rows out, as by the oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

import opticnerve
from opticnerve_server import cli
from opticnerve_server.models import registry
from photo_oracles import ORACLES
from running_server import running

DEMO = Path(__file__).parents[2] / "deploy" / "demo"
PHOTOGRAPHS = [DEMO / "cat.png", DEMO / "astronaut.jpg"]


def test_every_architecture_has_an_oracle() -> None:
    assert ORACLES.keys() | {"minicpmv"} == set(registry.ARCHITECTURES), "MiniCPM-V: test_slices_end_to_end"


@pytest.mark.parametrize("architecture", ORACLES)
def test_photographs_become_the_rows_of_the_official_code(architecture: str, tmp_path: Path) -> None:
    """Also what the official processor makes of them, where that is taken: one call has both."""
    oracle, model = ORACLES[architecture], tmp_path / "model"
    assert cli.main(["make-checkpoint", "--arch", architecture, "--out", str(model)]) == 0
    inputs = [oracle.process(model, np.array(Image.open(path).convert("RGB"))) for path in PHOTOGRAPHS]
    patches = [opticnerve.Patches(tensors) for tensors in inputs if oracle.patches]
    with (
        running(model, tmp_path, "--token-budgets", oracle.budgets) as server,
        opticnerve.Client(server.address, timeout=60) as client,
    ):
        embeddings = list(client.encode([*PHOTOGRAPHS, *patches], dtype="float32"))
        plans = client.plan(PHOTOGRAPHS)
    expected = [oracle.rows(model, tensors).numpy() for tensors in inputs]
    for index, embedding in enumerate(embeddings):
        plan, outcome, rows = (of_photographs[index % 2] for of_photographs in (plans, oracle.outcomes, expected))
        assert embedding.plan == plan
        assert plan.tokens == sum(span.rows for span in plan.spans) == len(rows)
        assert {dispatch.outcome for dispatch in embedding.dispatches} == set(outcome.split())
        levels = [embedding.main, *embedding.deepstack]
        for level, reference in zip(levels, np.split(rows, len(levels), axis=1), strict=True):
            assert_equal_rows(level, reference)


def assert_equal_rows(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    """By the norm ratio of the difference: of all rows together, and of the worst one."""
    assert found.shape == expected.shape
    difference, expected = found.astype(np.float64) - expected, expected.astype(np.float64)
    assert np.linalg.norm(difference) <= 1e-5 * np.linalg.norm(expected)
    assert (np.linalg.norm(difference, axis=1) <= 1e-4 * np.linalg.norm(expected, axis=1)).all()
