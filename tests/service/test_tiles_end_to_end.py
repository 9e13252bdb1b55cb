"""A video through a whole server of a model of tiles: a tile a frame, the rows that transformers makes of these."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import opticnerve
from opticnerve_server.models.base import VideoItem
from oracles import Media, load_model, oracle_rows, save_model
from running_server import running
from towers import load_tower


def test_a_video_is_a_tile_a_frame_and_goes_as_parts(tmp_path: Path) -> None:
    save_model("internvl", tmp_path / "model")
    planner = load_tower(tmp_path / "model").planner
    pictures = np.random.default_rng(0).integers(0, 256, (10, planner.side, planner.side, 3), dtype=np.uint8)
    with (
        running(tmp_path / "model", tmp_path, "--token-budgets", "4,12,32") as server,
        opticnerve.Client(server.address, timeout=120) as client,
    ):
        (embedding,) = client.encode([opticnerve.Frames(list(pictures), 2.0)], dtype="float32")
    media = Media(planner.plan(VideoItem(10, 2.0, planner.side, planner.side)), pictures)
    expected = oracle_rows(load_model(tmp_path / "model"), tmp_path / "model", [media]).numpy()
    assert np.linalg.norm(embedding.main - expected) <= 1e-5 * np.linalg.norm(expected)
    assert [span.timestamp for span in embedding.plan.spans] == [i / 2 for i in range(10)]
    assert [dispatch.units for dispatch in embedding.dispatches] == [8, 2]  # parts of at most the largest budget
