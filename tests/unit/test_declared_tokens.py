"""Declared tokens are the rows that are sent, of whatever a caller asks for: every architecture, random media."""

from __future__ import annotations

import random
from typing import Any

import pytest

from opticnerve_server.models.base import ImageItem, PlanError, Sampling, VideoItem
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.registry import ARCHITECTURES
from towers import load_tower

IMAGES = VIDEOS = 50
"""Of each architecture."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("declared") / request.param
    write_checkpoint(request.param, directory)
    return load_tower(directory)


def random_size(chance: random.Random) -> tuple[int, int]:
    """Of any proportions that a person would send."""
    height = round(2 ** chance.uniform(5, 12))
    return height, max(32, min(4096, round(height * 2 ** chance.uniform(-2, 2))))


def random_video(chance: random.Random) -> VideoItem:
    sampling = chance.choice([Sampling(), Sampling(), Sampling(num_frames=chance.randint(1, 40)), Sampling(fps=2.0)])
    return VideoItem(
        chance.randint(1, 300), chance.choice([1.0, 12.5, 24.0, 29.97, 60.0]), *random_size(chance), sampling
    )


def assert_rows_are_as_declared(tower: Any, item: ImageItem | VideoItem) -> bool:
    """Whether the model takes the item. What it gathers from its paths, and the parts of the item, are as declared."""
    try:
        plan = tower.planner.plan(item)
    except PlanError:
        return False
    lines = dict.fromkeys(tower.planner.paths, 1 << 20)
    assert plan.tokens == len(tower.gather_index([plan], lines)) == sum(span.rows for span in plan.spans) > 0, item
    parts = tower.planner.split(plan, lambda part: part.tokens <= 256)
    assert sum(len(tower.gather_index([part], lines)) for part in parts) == plan.tokens
    if isinstance(item, VideoItem):
        assert list(plan.frame_indices) == sorted(plan.frame_indices)
        assert set(plan.frame_indices) <= set(range(item.frames)), item
    return True


def test_images(tower: Any) -> None:
    chance = random.Random(0)
    taken = sum(assert_rows_are_as_declared(tower, ImageItem(*random_size(chance))) for _ in range(IMAGES))
    assert taken > IMAGES * 0.9


def test_videos(tower: Any) -> None:
    if "video" not in tower.planner.modalities:
        pytest.skip("takes none")
    chance = random.Random(0)
    taken = sum(assert_rows_are_as_declared(tower, random_video(chance)) for _ in range(VIDEOS))
    assert taken > VIDEOS / 2
