"""ERNIE-4.5-VL, tower and resampler, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from opticnerve_server.models import registry
from opticnerve_server.models.registry import ModelError
from oracles import Media, load_model, media_for, oracle_rows, save_model
from towers import (
    PATH,
    assert_close,
    assert_items_independent,
    assert_padding_harmless,
    exact_capacity,
    load_tower,
    poison,
    run_tower,
)

# Both epsilons are far from their defaults once, so that none can stand for the other.
CONFIGS: dict[str, dict[str, Any]] = {
    "published-shape": {},
    "narrow": {"depth": 2, "hidden_size": 48, "num_heads": 3, "text_hidden": 36},
    "epsilons": {"depth": 2, "rms_norm_eps": 1e-2, "text_eps": 0.3},
}
# Videos have an even number of frames, the last one repeated where it is odd.
GRIDS = [(1, 2, 2), (1, 2, 34), (4, 4, 6), (1, 18, 22), (2, 10, 2), (6, 2, 4), (1, 4, 6)]


def batch_of(grids: list[tuple[int, int, int]]) -> list[Media]:
    return [media_for("ernie4_5_vl_moe", *grid, seed=i, odd=i % 2 == 1) for i, grid in enumerate(grids)]


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_model("ernie4_5_vl_moe", directory, seed=len(request.param), **CONFIGS[request.param])
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_transformers(checkpoint: Path, dtype: str) -> None:
    model, tower, batch = load_model(checkpoint, getattr(torch, dtype)), load_tower(checkpoint, dtype), batch_of(GRIDS)
    assert_close(run_tower(tower, batch), oracle_rows(model, checkpoint, batch), tower)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_item_does_not_depend_on_its_batch(checkpoint: Path, dtype: str) -> None:
    assert_items_independent(load_tower(checkpoint, dtype), batch_of(GRIDS))


def test_padding_changes_nothing(checkpoint: Path) -> None:
    tower, batch = load_tower(checkpoint), batch_of(GRIDS[1:5])
    assert_padding_harmless(tower, batch, oracle_rows(load_model(checkpoint), checkpoint, batch))


def test_a_unit_is_folded_with_that_of_the_next_frame_or_itself(checkpoint: Path) -> None:
    tower, batch = load_tower(checkpoint), batch_of([(1, 2, 4), (4, 2, 2)])
    buffers = poison(tower, exact_capacity(batch))
    plans = [media.plan for media in batch]
    tower.fill(PATH, plans, buffers)
    np.testing.assert_array_equal(buffers["partner"], [0, 1, 3, 3, 5, 5])
    np.testing.assert_array_equal(tower.gather_index(plans, {PATH: 6}), [0, 1, 2, 4])


def test_parts_of_a_video_are_whole_pairs_of_frames(checkpoint: Path) -> None:
    tower, media = load_tower(checkpoint), media_for("ernie4_5_vl_moe", 6, 2, 4, seed=0, odd=True)
    parts = tower.planner.split(media.plan, lambda part: part.paths[PATH].units <= 9)
    assert [part.grid[0] for part in parts] == [4, 2]
    assert [part.tokens for part in parts] == [4, 2]
    assert [part.pixel_bytes for part in parts] == [media.frames[:4].nbytes, media.frames[4:].nbytes]
    rows = [
        run_tower(tower, [Media(parts[0], media.frames[:4])]),
        run_tower(tower, [Media(parts[1], media.frames[4:])]),
    ]
    assert_close(torch.cat(rows), run_tower(tower, [media]), tower)
    assert tower.planner.split(media.plan, lambda part: part.paths[PATH].units < 4) == [media.plan]


def test_the_original_layout(checkpoint: Path, tmp_path: Path) -> None:
    """Keys of the language model and of the resampler at the top, `mlp_ratio`, and the tower outside of `model`."""
    config = json.loads((checkpoint / "config.json").read_text())
    vision, text = config["vision_config"], config.pop("text_config")
    vision["mlp_ratio"] = vision.pop("intermediate_size") / vision["hidden_size"]
    moved = {
        "spatial_conv_size": vision.pop("spatial_merge_size"),
        "temporal_conv_size": vision.pop("temporal_merge_size"),
    }
    original = {**text, **config, **moved, "use_temporal_conv": True}
    (tmp_path / "config.json").write_text(json.dumps(original))
    settings = (checkpoint / "preprocessor_config.json").read_text()
    (tmp_path / "preprocessor_config.json").write_text(settings)
    tensors = load_file(checkpoint / "model.safetensors")
    outside = {name.replace("model.vision_model.", "vision_model."): tensor for name, tensor in tensors.items()}
    save_file(outside, tmp_path / "model.safetensors")
    batch = batch_of(GRIDS[:3])
    assert torch.equal(run_tower(load_tower(tmp_path), batch), run_tower(load_tower(checkpoint), batch))
    (tmp_path / "config.json").write_text(json.dumps({**original, "use_temporal_conv": False}))
    with pytest.raises(ModelError, match="use_temporal_conv is false"):
        registry.build_planner(registry.open_model(str(tmp_path), "safetensors"))
