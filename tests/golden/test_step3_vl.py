"""The Step3-VL family: the Perception Encoder against transformers, Step3's own tower against float64 step by step."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from image_sizes import sizes
from opticnerve_server.graphs import GraphManager, plan_capacities
from opticnerve_server.models.base import ImageItem, PlanError
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.presets import PRESETS, PROCESSORS
from opticnerve_server.models.processor import CLIP_MEAN, CLIP_STD
from opticnerve_server.models.registry import ModelError, ModelSource, build_planner
from opticnerve_server.models.two_path import GLOBAL, LOCAL
from opticnerve_server.models.windows import SNAPS
from opticnerve_server.selftest import self_test
from opticnerve_server.types import Launch, Outcome
from oracles import randomise
from step3_oracle import (
    VISION,
    WHOLE,
    official_plan,
    official_views,
    perception,
    planned_views,
    rows_of,
    step3_features,
    write_published,
)
from towers import assert_close, load_tower
from two_paths import engine_of, run


def write_perception(directory: Path) -> None:
    """The official tower with random weights, as published."""
    model = perception(VISION)
    randomise(model, seed=5)
    projector = torch.randn(40, 256, generator=torch.Generator().manual_seed(6)) / 16
    write_published(directory, "StepVLForConditionalGeneration", model, projector)


def write_step3(directory: Path) -> None:
    write_checkpoint("step3_vl", directory)
    stored = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(9)
    for name, tensor in stored.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim > 1:
            stored[name] = noise / math.sqrt(tensor[0].numel())
        else:
            stored[name] = 0.2 * noise + name.endswith(("norm1.weight", "norm2.weight"))
    stored["vit_large_projector.bias"] = torch.randn(128, generator=generator)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "projector_bias": True}))
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    (directory / "preprocessor_config.json").write_text(json.dumps({**settings, "max_image_size": 504}))


@pytest.fixture(scope="module", params=["step_vl", "step3_vl"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    (write_perception if request.param == "step_vl" else write_step3)(directory)
    return directory


def expected_rows(
    directory: Path, views_of: Callable[[np.ndarray], Any], images: list[np.ndarray], dtype: torch.dtype
) -> torch.Tensor:
    return torch.cat([rows_of(directory, *views_of(image), dtype) for image in images])


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


IMAGES = [picture(100, 100), picture(112, 70, 1), picture(40, 300, 2), picture(300, 200, 3), picture(600, 10, 4)]
"""Without crops; of a small window; of a thin one; of several; too thin, hence squared, with 36."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_the_oracle(checkpoint: Path, dtype: str) -> None:
    tower = load_tower(checkpoint, dtype)
    with engine_of(tower, {GLOBAL: (5,), LOCAL: (60,)}, use_graphs=False) as engine:
        found = run(engine, IMAGES).to(tower.dtype)
    views_of = functools.partial(planned_views, tower.planner)
    assert_close(found, expected_rows(checkpoint, views_of, IMAGES, getattr(torch, dtype)), tower)
    if dtype == "float32":  # with pixels that were never rounded to fixed point, of noise, the worst there is
        official = expected_rows(checkpoint, official_views, IMAGES, torch.float32)
        assert float((found - official).norm() / official.norm()) <= 3e-5


def test_one_path_hits_while_the_other_falls_back(checkpoint: Path) -> None:
    tower = load_tower(checkpoint)
    plain, elongated, thin, large, squared = IMAGES
    views_of = functools.partial(planned_views, tower.planner)
    batches = [[plain], [large], [plain, elongated, plain], [squared], [plain, plain], [thin, large]]
    with engine_of(tower, {GLOBAL: (1, 2, 3), LOCAL: (4, 20)}) as engine:
        for batch in batches:
            assert_close(run(engine, batch), expected_rows(checkpoint, views_of, batch, torch.float32), tower)
        outcomes = [{run.path: run.outcome for run in finished.runs} for finished in engine.batches]
    assert outcomes[0] == {GLOBAL: Outcome.HIT}, "an image without crops leaves their path alone"
    assert {GLOBAL: Outcome.HIT, LOCAL: Outcome.MISS} in outcomes
    assert {GLOBAL: Outcome.HIT, LOCAL: Outcome.HIT} in outcomes


def test_the_leading_rows_are_equal(tmp_path: Path) -> None:
    """Their order says nothing, and neither does the company of other views."""
    write_step3(tmp_path)
    views = torch.randn(3, 3, WHOLE, WHOLE, generator=torch.Generator().manual_seed(1))
    together = step3_features(tmp_path, views, torch.float64)
    alone = torch.cat([step3_features(tmp_path, view[None], torch.float64) for view in views])
    assert torch.allclose(together, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("architecture", ["step_vl", "step3p7"])
def test_plans_follow_the_official_rule(architecture: str) -> None:
    config = PRESETS["step-3.7-flash"]
    planner: Any = build_planner(ModelSource("m", architecture, config, PROCESSORS[architecture], None))
    tried = [*sizes(504), (728, 728), (728, 485), (485, 728), (729, 729), (605, 2000), (10, 41), (31, 124), (31, 125)]
    tried += [(window, window * fifths // 5) for window in range(35, 335, 5) for fifths in range(8, 32)]
    assert len(tried) >= 2000
    for height, width in tried:
        squared, *rest = official_plan(width, height, 728, 504, 3024, exact=architecture == "step3p7")
        if rest == [None]:
            with pytest.raises(PlanError, match="send a less narrow one"):
                planner.plan(ImageItem(height, width))
            continue
        size, snapped, window, across, down = rest
        cut = planner.cut(height, width)
        assert cut == (squared, size[::-1], snapped[::-1], window, down, across), (height, width)
        plan = planner.plan(ImageItem(height, width))
        assert plan.tokens == 169 + 81 * across * down == sum(span.rows for span in plan.spans)


@pytest.mark.parametrize(("architecture", "crops"), [("step3_vl", 3), ("step_vl", 3), ("step3p7", 2)])
def test_at_an_exact_fifth_each_model_keeps_its_own_rule(architecture: str, crops: int) -> None:
    assert SNAPS[architecture](220, 100) == 100 * crops
    assert SNAPS[architecture](120, 100) == 100
    assert SNAPS[architecture](99, 100) == 99


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: str(image.shape[:2]))
def test_pixels_are_the_official_ones_to_half_a_step(checkpoint: Path, image: np.ndarray) -> None:
    planner = load_tower(checkpoint).planner
    plan = planner.plan(ImageItem(*image.shape[:2]))
    out = np.full(plan.pixel_bytes, 7, np.uint8)
    planner.fill_pixels(image, plan, out)
    levels, at = out.view("<u2").astype(np.float64) / 256, 0
    for views in official_views(image):
        wanted = views.double() * torch.tensor(CLIP_STD)[:, None, None] + torch.tensor(CLIP_MEAN)[:, None, None]
        wanted = wanted.permute(0, 2, 3, 1).numpy().reshape(-1) * 255
        assert np.abs(levels[at : at + wanted.size] - wanted).max(initial=0) <= 1 / 512 + 1e-3
        at += wanted.size
    assert at == levels.size


def test_replay_equals_eager_on_every_automatic_budget(checkpoint: Path) -> None:
    tower = load_tower(checkpoint)
    planned = plan_capacities(tower.planner.paths, explicit={}, cap=None, max_items=None, launch=Launch.ROWS)
    graphs = GraphManager(tower, planned)
    tried = []
    with torch.inference_mode():
        graphs.capture(lambda *_: None, on_failure="fail")
        self_test(graphs, lambda path, capacity: tried.append(path))
    assert tried.count(GLOBAL) == 16
    assert tried.count(LOCAL) >= 20


@pytest.mark.parametrize(
    ("file", "change", "match"),
    [
        ("preprocessor_config.json", {"size": {"height": 100, "width": 100}}, "must be the tower's image_size 112"),
        ("preprocessor_config.json", {"patch_size": 85}, "patch_size is 85"),
        ("preprocessor_config.json", {"image_mean": [0.5, 0.5, 0.5]}, "image_mean is"),
        ("config.json", {"understand_projector_stride": None}, "understand_projector_stride"),
        ("config.json", {"text_config": None}, "hidden_size"),
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
