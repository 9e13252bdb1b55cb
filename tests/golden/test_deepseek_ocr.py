"""DeepSeek-OCR against the same tower in transformers (`deepseek_oracle.py`)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import deepseek_oracle
from deepseek_oracle import grid_of, published, rows_of, views_of
from image_sizes import sizes
from opticnerve_server.graphs import GraphManager, plan_capacities
from opticnerve_server.models.base import ImageItem
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.presets import PRESETS, PROCESSORS
from opticnerve_server.models.registry import ModelError, ModelSource, build_planner
from opticnerve_server.models.two_path import GLOBAL, LOCAL
from opticnerve_server.selftest import self_test
from opticnerve_server.types import Launch, Outcome
from oracles import randomise
from towers import assert_close, load_tower
from two_paths import engine_of, run

WHOLE, CROP, OUT = 256, 192, 40
SETTINGS = {"base_size": WHOLE, "image_size": CROP, "max_crops": 6}
SMALL = (100, 150)
"""No side is longer than a crop."""


CONFIG = {
    "architectures": ["DeepseekOCRForCausalLM"],
    "model_type": "deepseek_vl_v2",
    "projector_config": {"projector_type": "linear", "input_dim": 96, "n_embed": OUT},
    "vision_config": {
        "image_size": WHOLE,
        "mlp_ratio": 3.7362,
        "width": {
            "sam_vit_b": {
                "width": 32, "layers": 3, "heads": 4, "global_attn_indexes": [0, 2], "downsample_channels": [40, 48],
            },
            # A table of 3 x 3: that of the crops, not that of the whole view.
            "clip-l-14-224": {"width": 48, "layers": 2, "heads": 4, "image_size": 42, "patch_size": 14},
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The official tower with random weights, as the published file has them."""
    directory = tmp_path_factory.mktemp("deepseek_ocr")
    model = deepseek_oracle.build(CONFIG["vision_config"])
    randomise(model, seed=3)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(4)
    for name, shape in (("projector.weight", (OUT, 96)), ("projector.bias", (OUT,))):
        weights[name] = torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
    for name in ("image_newline", "view_seperator"):
        weights[name] = torch.randn(OUT, generator=generator)
    stored = {f"model.{published(name)}": tensor for name, tensor in weights.items() if ".k_proj." not in name}
    for name in [name for name in weights if ".q_proj." in name]:
        parts = [weights[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
        stored[f"model.{published(name)}"] = torch.cat(parts)
    stored = {name: tensor for name, tensor in stored.items() if ".v_proj." not in name}
    stored["model.vision_model.embeddings.patch_embedding.weight"] = torch.zeros(48, 3, 14, 14)
    stored["model.embed_tokens.weight"] = torch.zeros(8, OUT)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return directory


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def expected_rows(checkpoint: Path, images: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
    return rows_of(checkpoint, [views_of(image, WHOLE, CROP) for image in images], dtype)


IMAGES = [picture(*SMALL), picture(400, 300, 1), picture(200, 1000, 2), picture(193, 192, 3)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_transformers(checkpoint: Path, dtype: str) -> None:
    tower = load_tower(checkpoint, dtype)
    with engine_of(tower, {GLOBAL: (4,), LOCAL: (12,)}, use_graphs=False) as engine:
        found = run(engine, IMAGES).to(tower.dtype)
    assert_close(found, expected_rows(checkpoint, IMAGES, getattr(torch, dtype)), tower)


def test_one_path_hits_while_the_other_falls_back(checkpoint: Path) -> None:
    tower = load_tower(checkpoint)
    small, tall, wide, square = IMAGES
    batches = [[small], [tall], [small, square, small], [small, small], [wide], [small]]
    with engine_of(tower, {GLOBAL: (1, 2, 3), LOCAL: (2, 4)}) as engine:
        for batch in batches:
            rows = run(engine, batch)
            assert_close(rows, expected_rows(checkpoint, batch, torch.float32), tower)
        outcomes = [{run.path: run.outcome for run in finished.runs} for finished in engine.batches]
    assert {GLOBAL: Outcome.HIT, LOCAL: Outcome.MISS} in outcomes, "an image of five crops, of which no graph has room"
    assert {GLOBAL: Outcome.HIT, LOCAL: Outcome.HIT} in outcomes
    assert outcomes[0] == {GLOBAL: Outcome.HIT}, "a small image leaves the local path alone"
    budgets = {run.budget for finished in engine.batches for run in finished.runs if run.path == GLOBAL}
    assert budgets == {1, 2, 3}


def test_replay_equals_eager_on_every_automatic_budget(tmp_path: Path) -> None:
    write_checkpoint("deepseek_ocr", tmp_path)
    tower = load_tower(tmp_path)
    planned = plan_capacities(tower.planner.paths, explicit={}, cap=None, max_items=None, launch=Launch.ROWS)
    graphs = GraphManager(tower, planned)
    tried = []
    with torch.inference_mode():
        graphs.capture(lambda *_: None, on_failure="fail")
        self_test(graphs, lambda path, capacity: tried.append((path, capacity.units)))
    assert tried == [(GLOBAL, n) for n in range(1, 17)] + [(LOCAL, n) for n in range(2, 17)], "no image has one crop"


@pytest.mark.parametrize("most", [6, 9])
def test_plans_follow_the_official_rule(most: int) -> None:
    source = ModelSource(
        "m", "deepseek_ocr", PRESETS["deepseek-ocr"], {**PROCESSORS["deepseek_ocr"], "max_crops": most}, None
    )
    planner = build_planner(source)
    tried = [*sizes(64), (640, 641), (1000, 1250), (960, 1200), (1000, 700), (500, 4000), (640, 640)]
    assert len(tried) >= 2000
    for height, width in tried:
        plan = planner.plan(ImageItem(height, width))
        across, down = grid_of(height, width, most, 640)
        tiled = (across, down) != (1, 1)
        assert planner.crops_of(plan) == ((down, across) if tiled else (0, 0)), (height, width)
        assert plan.tokens == 273 + tiled * (10 * down) * (10 * across + 1)
        assert sum(span.rows for span in plan.spans) == plan.tokens


def test_the_rows_of_a_full_batch_are_those_of_its_units_and_their_margins() -> None:
    planner = build_planner(ModelSource("m", "deepseek_ocr", PRESETS["deepseek-ocr"], PROCESSORS["deepseek_ocr"], None))
    room = {path: spec.tokens_per_unit + spec.margin_per_unit for path, spec in planner.paths.items()}
    spare = []
    for height, width in sizes(64):
        plan = planner.plan(ImageItem(height, width))
        spare.append(sum(room[path] * used.units for path, used in plan.paths.items()) - plan.tokens)
    assert min(spare) == 0, "an item of one column of crops, which has most newlines, needs it all and no more"


@pytest.mark.parametrize("size", [(100, 150), (150, 100), (64, 64), (300, 900), (1, 999), (999, 1), (257, 255)])
def test_pixels_are_those_of_pillow(checkpoint: Path, size: tuple[int, int]) -> None:
    planner, image = load_tower(checkpoint).planner, picture(*size)
    plan = planner.plan(ImageItem(*size))
    out = np.full(plan.pixel_bytes, 7, np.uint8)
    planner.fill_pixels(image, plan, out)
    views, end = views_of(image, WHOLE, CROP), plan.paths[GLOBAL].pixel_bytes
    assert np.array_equal(out[:end], views.whole.reshape(-1))
    assert np.array_equal(out[end:], views.crops.reshape(-1))


def test_without_a_processor_file_it_is_that_of_the_code(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    planner = load_tower(tmp_path).planner
    assert [(views.side, views.most) for views in planner.views.values()] == [(1024, 1), (640, 6)]


@pytest.mark.parametrize(
    ("file", "change", "match"),
    [
        ("preprocessor_config.json", {"crop_mode": False}, "crop_mode is False"),
        ("preprocessor_config.json", {"image_mean": [0.4, 0.5, 0.5]}, "image_mean is"),
        ("preprocessor_config.json", {"base_size": 1000}, "base_size is 1000"),
        ("preprocessor_config.json", {"max_crops": 1}, "max_crops is 1"),
        ("config.json", {"projector_config": {"projector_type": "mlp", "n_embed": 40}}, "projector_type is 'mlp'"),
        ("config.json", {"projector_config": {}}, "how wide rows are"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    checkpoint: Path, tmp_path: Path, file: str, change: dict[str, object], match: str
) -> None:
    for path in checkpoint.glob("*.json"):
        content = json.loads(path.read_text())
        (tmp_path / path.name).write_text(json.dumps(content | change if path.name == file else content))
    with pytest.raises(ModelError, match=match):
        load_tower(tmp_path)
