"""The buffers of the (t, h, w) towers and the closed forms that fill them, against transformers' own helpers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import vision_utils

from opticnerve_server.models import grid_tower
from opticnerve_server.models.base import PIXELS
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.types import Capacity, Load
from oracles import random_media
from towers import PATH, exact_capacity, load_tower, poison

PATCHES = {"qwen3_vl": 16, "qwen2_5_vl": 14}


@pytest.fixture(params=PATCHES)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tower(architecture: str, tmp_path: Path) -> Any:
    write_checkpoint(architecture, tmp_path)
    return load_tower(tmp_path)


def random_grids(count: int, seed: int) -> list[tuple[int, int, int]]:
    sizes = np.random.default_rng(seed).integers(1, 20, (count, 3))
    return [(1 + int(t) // 6, 2 * int(h), 2 * int(w)) for t, h, w in sizes]


def filled(tower: Any, architecture: str, grids: list[tuple[int, int, int]], spare: int) -> dict[str, Any]:
    batch = [random_media(*grid, patch=PATCHES[architecture], seed=0) for grid in grids]
    exact = exact_capacity(batch)
    buffers = poison(tower, Capacity(exact.units + spare, exact.items, exact.segments + spare, exact.longest))
    tower.fill(PATH, [media.plan for media in batch], buffers)
    return buffers


@pytest.mark.parametrize("seed", range(10))
def test_metadata_equals_that_of_transformers(tower: Any, architecture: str, seed: int) -> None:
    grids = random_grids(12, seed)
    grid_thw = torch.tensor(grids)
    buffers = filled(tower, architecture, grids, spare=9)
    position = vision_utils.get_vision_position_ids(grid_thw, 2)
    cu = vision_utils.get_vision_cu_seqlens(grid_thw)
    rows, frames = len(position), len(cu)
    order = torch.arange(rows // 4)
    if architecture == "qwen2_5_vl":
        order, cu_windows = vision_utils.get_vision_window_index(grid_thw, 2, 112, 14)
        assert buffers["cu_windows"][: len(cu_windows)].tolist() == cu_windows.tolist()
        assert set(buffers["cu_windows"][len(cu_windows) :].tolist()) <= {rows}
    else:
        taps, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grid_thw, num_grid_per_side=16, align_corners=True, spatial_merge_size=2
        )
        np.testing.assert_array_equal(buffers["taps"][:rows], taps.numpy())
        np.testing.assert_allclose(buffers["weights"][:rows], weights.numpy(), rtol=0, atol=1e-6)
        assert not buffers["weights"][rows:].any()
    np.testing.assert_array_equal(buffers["position"][:rows].reshape(-1, 4, 2), position.view(-1, 4, 2)[order].numpy())
    assert buffers["cu_frames"][:frames].tolist() == cu.tolist()
    assert set(buffers["cu_frames"][frames:].tolist()) == {rows}


def test_the_gather_restores_the_order_of_tokens(tower: Any, architecture: str) -> None:
    batch = [random_media(*grid, patch=PATCHES[architecture], seed=0) for grid in random_grids(8, 3)]
    plans = [media.plan for media in batch]
    index = tower.gather_index(plans, {PATH: 10_000})
    assert index.dtype == np.int32
    assert sorted(index.tolist()) == list(range(sum(plan.tokens for plan in plans)))
    buffers = poison(tower, exact_capacity(batch))
    tower.fill(PATH, plans, buffers)
    begin = 0
    for plan in plans:
        first = buffers["position"].reshape(-1, 4, 2)[index[begin : begin + plan.tokens], 0]
        t, h, w = plan.grid
        expected = [(row, column) for _ in range(t) for row in range(0, h, 2) for column in range(0, w, 2)]
        assert first.tolist() == [list(position) for position in expected]
        begin += plan.tokens


def test_rows_read_the_frames_that_are_stored(tower: Any, architecture: str) -> None:
    """The lines of pixels of each part lie behind those of the others; the last frame stands in for missing ones."""
    patch, plans, expected = PATCHES[architecture], [], []
    begin = 0
    for t, h, w, stored in [(1, 4, 6, 1), (3, 2, 4, 5), (2, 6, 2, 4), (4, 2, 2, 7), (1, 2, 2, 2)]:
        plan = random_media(t, h, w, patch=patch, seed=0).plan
        path = msgspec.structs.replace(plan.paths[PATH], pixel_bytes=stored * h * w * patch**2 * 3)
        plans.append(msgspec.structs.replace(plan, paths={PATH: path}))
        for group in range(t):
            frames = [min(2 * group + i, stored - 1) for i in range(2)]
            expected += [[begin + frame * h * w * patch for frame in frames]] * (h * w)
        begin += stored * h * w * patch
    load = Load.of(plan.paths[PATH] for plan in plans)
    buffers = poison(tower, Capacity(load.units + 3, load.items, load.segments, load.longest))
    tower.fill(PATH, plans, buffers)
    row, column = buffers["position"].T
    first = buffers["origin"] - (row * patch * buffers["stride"] + column)[:, None]
    assert first[: len(expected)].tolist() == expected
    assert not first[len(expected) :].any()


def test_pad_rows_read_inside_the_buffers(tower: Any, architecture: str) -> None:
    buffers = filled(tower, architecture, random_grids(5, 1), spare=50)
    patch = PATCHES[architecture]
    last = buffers["origin"] + buffers["stride"][:, None] * (patch - 1)
    assert buffers["origin"].min() >= 0
    assert last.max() < buffers[PIXELS].size // (patch * 3)


def test_pixels_come_last_and_have_room_for_the_frames_of_videos(tower: Any, architecture: str) -> None:
    buffers = tower.buffers(PATH, Capacity(units=64, items=2, segments=5, longest=256))
    assert list(buffers)[-1] == PIXELS
    assert buffers[PIXELS].shape == (64 * 4 * 2 * PATCHES[architecture] ** 2 * 3,)
    assert buffers["cu_frames"].shape == (6,)


def test_no_items_at_all_run_to_defined_rows(tower: Any) -> None:
    capacity = Capacity(units=8, items=1, segments=1, longest=32)
    buffers = poison(tower, capacity)
    tower.fill(PATH, [], buffers)
    assert tower.gather_index([], {PATH: 8}).shape == (0,)
    rows = tower.forward(PATH, {name: torch.from_numpy(array) for name, array in buffers.items()}, capacity)
    assert rows.shape == (8, tower.planner.layout.width)
    assert rows.isfinite().all()


def test_a_batch_over_the_capacity_is_an_error_and_not_cut(tower: Any, architecture: str) -> None:
    batch = [random_media(1, 4, 4, patch=PATCHES[architecture], seed=0) for _ in range(3)]
    plans = [media.plan for media in batch]
    for capacity in (Capacity(11, 3, 3, 16), Capacity(12, 3, 2, 16)):
        with pytest.raises(ValueError, match=r"wrong size|shape"):
            tower.fill(PATH, plans, poison(tower, capacity))


def test_cached_frames_stay_within_their_bytes(tower: Any, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_tower, "FRAME_CACHE_BYTES", 40_000)
    grids = random_grids(30, 5)
    first = filled(tower, architecture, grids, spare=1)
    assert 0 < tower._frame_bytes <= 40_000
    assert tower._frame_bytes == sum(frame.nbytes for frame in tower._frames.values())
    for name, array in filled(tower, architecture, grids, spare=1).items():
        np.testing.assert_array_equal(array, first[name])
