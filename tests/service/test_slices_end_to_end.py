"""Photographs and a video through a whole server of MiniCPM-V: the rows of its tower run slice by slice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import opticnerve
from golden.test_minicpmv import checkpoint, expected_rows
from opticnerve_server.models.base import ImageItem, VideoItem
from oracles import Media
from running_server import running
from towers import load_tower

PHOTOGRAPHS = Path(__file__).parents[2] / "deploy" / "demo"
NAMES = ("cat.png", "coffee.webp", "astronaut.jpg")

__all__ = ["checkpoint"]  # a fixture: a checkpoint of each version


def test_rows_equal_the_oracle(checkpoint: Path, tmp_path: Path) -> None:
    planner = load_tower(checkpoint).planner
    pictures = [np.array(Image.open(PHOTOGRAPHS / name).convert("RGB")) for name in NAMES]
    items = [ImageItem(*picture.shape[:2]) for picture in pictures]
    sent: list[object] = [PHOTOGRAPHS / name for name in NAMES]
    media: list[np.ndarray] = [*pictures]
    plans = [planner.plan(item) for item in items]
    if "video" in planner.modalities:
        frames = np.random.default_rng(0).integers(0, 256, (6, 50, 90, 3), dtype=np.uint8)
        sent.append(opticnerve.Frames(list(frames), 2.0))
        plans.append(planner.plan(VideoItem(6, 2.0, 50, 90)))
        media.append(frames[list(plans[-1].frame_indices)])
    with (
        running(checkpoint, tmp_path, "--token-budgets", "8,24,64") as server,
        opticnerve.Client(server.address, timeout=120) as client,
    ):
        embeddings = list(client.encode(sent, dtype="float32"))
        if "video" not in planner.modalities:
            with pytest.raises(opticnerve.ServerError, match="takes no videos: send their frames as images"):
                list(client.encode([opticnerve.Frames([pictures[0]], 1.0)]))
    for plan, pixels, embedding in zip(plans, media, embeddings, strict=True):
        slices = np.empty(plan.pixel_bytes, np.uint8)
        planner.fill_pixels(pixels, plan, slices)
        expected = expected_rows(checkpoint, [Media(plan, slices)]).numpy().astype(np.float64)
        assert embedding.main.shape == expected.shape
        assert np.linalg.norm(embedding.main - expected) <= 1e-5 * np.linalg.norm(expected)
        assert (embedding.grid, embedding.tokens, embedding.outcome) == (plan.grid, plan.tokens, "replay")
        found = [(span.kind, span.rows, span.tile_row, span.tile_col, span.timestamp) for span in embedding.plan.spans]
        assert found == [(span.kind, span.rows, span.tile_row, span.tile_col, span.timestamp) for span in plan.spans]
