"""Photographs through a whole server of a model of tiles: the rows that transformers makes of their tiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import opticnerve
from opticnerve_server.models.base import ImageItem, VideoItem
from oracles import Media, load_model, oracle_rows, save_model
from running_server import Official, running
from tiny_models import TILES
from towers import PATH, load_tower

PHOTOGRAPHS = Path(__file__).parents[2] / "deploy" / "demo"
NAMES = ("cat.png", "coffee.webp", "astronaut.jpg", "rocket.jpg")
BUDGETS = "4,12,32"
"""In tokens: 1, 3 and 8 tiles, as all these small towers have 4 tokens a tile. Larger items go as parts."""


@pytest.fixture(scope="module", params=[name for name in TILES if name != "internvl_chat"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Official]:
    directory = tmp_path_factory.mktemp(request.param)
    save_model(request.param, directory / "model")
    with running(directory / "model", directory, "--token-budgets", BUDGETS) as server:
        yield Official(request.param, directory / "model", server)


def tiles_of(name: str, directory: Path) -> Media:
    """A photograph as the tiles of this model."""
    pixels = np.array(Image.open(PHOTOGRAPHS / name).convert("RGB"))
    planner = load_tower(directory).planner
    plan = planner.plan(ImageItem(*pixels.shape[:2]))
    tiles = np.empty(plan.pixel_bytes, np.uint8)
    planner.fill_pixels(pixels, plan, tiles)
    return Media(plan, tiles.reshape(-1, planner.side, planner.side, 3))


def test_rows_equal_transformers(served: Official) -> None:
    with opticnerve.Client(served.server.address, timeout=120) as client:
        embeddings = list(client.encode([PHOTOGRAPHS / name for name in NAMES], dtype="float32"))
    model = load_model(served.directory)
    for name, embedding in zip(NAMES, embeddings, strict=True):
        media = tiles_of(name, served.directory)
        expected = oracle_rows(model, served.directory, [media]).numpy().astype(np.float64)
        assert embedding.main.shape == expected.shape
        off = np.linalg.norm(embedding.main - expected, axis=1) / np.linalg.norm(expected, axis=1)
        assert np.linalg.norm(embedding.main - expected) <= 1e-5 * np.linalg.norm(expected), name
        assert off.max() <= 1e-4, name
        plan = media.plan
        assert (embedding.grid, embedding.tokens) == (plan.grid, plan.tokens)
        found = [(span.kind, span.rows, span.tile_row, span.tile_col) for span in embedding.plan.spans]
        assert found == [(span.kind, span.rows, span.tile_row, span.tile_col) for span in plan.spans]
        assert embedding.outcome == "replay"
        assert sum(dispatch.units for dispatch in embedding.dispatches) == plan.paths[PATH].units
        assert {dispatch.budget for dispatch in embedding.dispatches} <= {1, 3, 8}


def test_videos_are_a_tile_a_frame_or_refused_with_what_helps(served: Official) -> None:
    planner = load_tower(served.directory).planner
    shape = (10, planner.side, planner.side, 3)
    pictures = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    frames = opticnerve.Frames(list(pictures), 2.0)
    if "video" in planner.modalities:
        with opticnerve.Client(served.server.address, timeout=120) as client:
            (embedding,) = client.encode([frames], dtype="float32")
        media = Media(planner.plan(VideoItem(10, 2.0, *shape[1:3])), pictures)
        expected = oracle_rows(load_model(served.directory), served.directory, [media]).numpy()
        assert np.linalg.norm(embedding.main - expected) <= 1e-5 * np.linalg.norm(expected)
        assert [span.timestamp for span in embedding.plan.spans] == [i / 2 for i in range(10)]
        assert len(embedding.dispatches) == 2  # a part of 8 tiles, then the rest
        return
    with (
        opticnerve.Client(served.server.address, timeout=120) as client,
        pytest.raises(opticnerve.ServerError, match="takes no videos: send their frames as images"),
    ):
        list(client.encode([frames]))
