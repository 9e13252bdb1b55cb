"""Photographs through the public client and a whole server: the rows that transformers makes of them."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

import opticnerve
from oracles import load_model, media_of, oracle_rows
from running_server import Official

PHOTOGRAPHS = Path(__file__).parents[2] / "deploy" / "demo"
NAMES = ("cat.png", "coffee.webp", "astronaut.jpg", "rocket.jpg")
BUDGETS = (64, 256)


def resized(name: str, directory: Path) -> npt.NDArray[np.uint8]:
    """A photograph as the official torchvision-backed processor resizes it: by torch, from bytes to bytes."""
    processor = Qwen2VLImageProcessorPil.from_pretrained(directory)
    pixels = np.array(Image.open(PHOTOGRAPHS / name).convert("RGB"))
    size = smart_resize(
        *pixels.shape[:2],
        factor=processor.patch_size * processor.merge_size,
        min_pixels=processor.size["shortest_edge"],
        max_pixels=processor.size["longest_edge"],
    )
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    planes = torch.nn.functional.interpolate(planes, size, mode="bicubic", antialias=True)
    return planes[0].permute(1, 2, 0).contiguous().numpy()


def relative(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> tuple[float, float]:
    """Norm ratio of the difference: of all rows together, and of the worst one."""
    difference, expected = found.astype(np.float64) - expected, expected.astype(np.float64)
    rows = np.linalg.norm(difference, axis=1) / np.linalg.norm(expected, axis=1)
    return float(np.linalg.norm(difference) / np.linalg.norm(expected)), float(rows.max())


@pytest.fixture(scope="module")
def embeddings(official: Official) -> list[opticnerve.Embedding]:
    """The float32 rows of all photographs, from one call."""
    with opticnerve.Client(official.server.address, timeout=120) as client:
        return list(client.encode([PHOTOGRAPHS / name for name in NAMES], dtype="float32"))


def test_rows_equal_transformers(official: Official, embeddings: list[opticnerve.Embedding]) -> None:
    model = load_model(official.directory)
    for name, embedding in zip(NAMES, embeddings, strict=True):
        media = media_of(resized(name, official.directory)[None], patch=official.patch)
        assert (embedding.grid, embedding.tokens) == (media.plan.grid, media.plan.tokens)
        expected = oracle_rows(model, official.directory, [media]).numpy()
        levels = [embedding.main, *embedding.deepstack]
        assert len(levels) == (1 if official.architecture == "qwen2_5_vl" else 4)
        for level, reference in zip(levels, np.split(expected, len(levels), axis=1), strict=True):
            whole, row = relative(level, reference)
            assert whole <= 1e-5, name
            assert row <= 1e-4, name


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
