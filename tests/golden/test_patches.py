"""The patches that a tower's forward gathers, bit for bit those of the official torchvision-backed processors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from golden.official_patches import checksum, pattern
from opticnerve_server.models.base import PIXELS
from opticnerve_server.models.checkpoint import write_checkpoint
from oracles import Media, official_patches, random_media, save_model
from towers import PATH, exact_capacity, load_tower, poison

# Printed by official_patches.py with torchvision 0.29.1 and transformers 5.24.0.
CHECKSUMS = {
    ("qwen3_vl", 32, 32): "30c55bf09ffd2091d077638377a9d3a1f76d0042ea394c6e10cdb71ddc0830a0",
    ("qwen3_vl", 64, 224): "aee5d2a4f0f464331bb9e91d323e02ae30b1920eecc0217998c8f1a7c2abeada",
    ("qwen3_vl", 352, 96): "a50fe8053600037634db5e383729ea9604d314140a88827e493a07c63ac87021",
    ("qwen2_5_vl", 28, 28): "d1971998a7e3c0a38596a96799ae1e9817d3f6f3599fad4cb4cba4d06b07ac55",
    ("qwen2_5_vl", 56, 196): "5af0df6217f03d89661e8335cefccc6dbe30c450b1b7e20fba553d000fbda750",
    ("qwen2_5_vl", 308, 84): "e0e5397039e78bc140825917f666589c8357157467f23577c9b57373379f190e",
}


def gathered(directory: Path, batch: list[Media]) -> torch.Tensor:
    """Patches with rows and axes in the official order, float32 [rows, 3 x temporal_patch x patch x patch]."""
    tower = load_tower(directory)
    arrays = poison(tower, exact_capacity(batch))
    plans = [media.plan for media in batch]
    tower.fill(PATH, plans, arrays)
    used = np.concatenate([media.frames.ravel() for media in batch])
    arrays[PIXELS][: used.size] = used
    patches = tower.patch_embed.levels({name: torch.from_numpy(array) for name, array in arrays.items()}, torch.float32)
    patches = patches.view(len(patches), tower.planner.temporal_patch, tower.planner.patch, -1, 3)
    tokens = patches.permute(0, 4, 1, 2, 3).reshape(-1, tower.planner.merge**2, patches[0].numel())
    return tokens[torch.from_numpy(tower.gather_index(plans, {PATH: len(tokens)}))].flatten(0, 1)


@pytest.mark.parametrize(("architecture", "height", "width"), CHECKSUMS)
def test_bit_equal_to_the_official_processor(architecture: str, height: int, width: int, tmp_path: Path) -> None:
    write_checkpoint(architecture, tmp_path)
    patch = 16 if architecture == "qwen3_vl" else 14
    media = random_media(1, height // patch, width // patch, patch=patch, seed=0)
    patches = gathered(tmp_path, [Media(media.plan, pattern(height, width)[None])])
    assert checksum(patches.numpy()) == CHECKSUMS[architecture, height, width]


@pytest.mark.parametrize(("architecture", "patch"), [("qwen3_vl", 16), ("qwen2_5_vl", 14)])
def test_stills_and_clips_packed_together(architecture: str, patch: int, tmp_path: Path) -> None:
    save_model(architecture, tmp_path)
    grids = [(3, 4, 6), (1, 2, 2), (2, 10, 4), (1, 18, 22)]
    for odd in (False, True):
        batch = [random_media(*grid, patch=patch, seed=i, odd=odd) for i, grid in enumerate(grids)]
        expected = torch.cat([official_patches(architecture, tmp_path, media) for media in batch])
        torch.testing.assert_close(gathered(tmp_path, batch), expected, rtol=0, atol=2e-6)
