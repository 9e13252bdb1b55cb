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
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.models.step3p7.configuration_step3p7 import Step3p7VisionConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7VisionModel

from image_sizes import sizes
from opticnerve_server.bench.inprocess import InProcessEngine
from opticnerve_server.graphs import GraphManager, plan_capacities
from opticnerve_server.models.base import ImageItem, PlanError
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.presets import PRESETS, PROCESSORS
from opticnerve_server.models.processor import CLIP_MEAN, CLIP_STD
from opticnerve_server.models.registry import ModelError, ModelSource, build_planner
from opticnerve_server.models.two_path import GLOBAL, LOCAL
from opticnerve_server.selftest import self_test
from opticnerve_server.types import Outcome
from oracles import randomise
from towers import assert_close, load_tower

WHOLE, CROP, OUT = 112, 84, 40
SETTINGS = {"size": {"height": WHOLE, "width": WHOLE}, "patch_size": CROP, "max_image_size": 504}
RENAMED = (
    ("embeddings.patch_embedding.", "conv1."), ("embeddings.position_embedding.weight", "positional_embedding"),
    ("pre_layernorm.", "ln_pre."), ("layers.", "transformer.resblocks."), ("layernorm_before.", "ln_1."),
    ("layernorm_after.", "ln_2."), ("lambda_1", "ls_1.gamma"), ("lambda_2", "ls_2.gamma"), ("mlp.fc1.", "mlp.c_fc."),
    ("mlp.fc2.", "mlp.c_proj."), ("downsampler", "vit_downsampler"),
)  # fmt: skip


def perception_config() -> Any:
    return Step3p7VisionConfig(width=64, layers=3, heads=4, image_size=WHOLE, mlp_ratio=2.0, max_position_embeddings=64)


def write_perception(directory: Path) -> None:
    """The official tower with random weights in oracle.safetensors, and as published beside that."""
    model = Step3p7VisionModel(perception_config())
    randomise(model, seed=5)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(6)
    projector = torch.randn(OUT, 256, generator=generator) / 16
    stored = {"vit_large_projector.weight": projector, "model.embed_tokens.weight": torch.zeros(8, OUT)}
    for name, tensor in weights.items():
        published = name
        for old, new in RENAMED:
            published = published.replace(old, new)
        if ("_proj." in published and ".attn." in published) or ".self_attn." in published:
            continue
        stored[f"vision_model.{published}"] = tensor
    for number in range(3):
        prefix = next(name for name in weights if name.startswith(f"layers.{number}.") and "q_proj" in name)
        attention = prefix.partition("q_proj")[0]
        ours = f"vision_model.transformer.resblocks.{number}.attn"
        for kind in ("weight", "bias"):
            q, k, v = (weights[f"{attention}{part}_proj.{kind}"] for part in "qkv")
            stored[f"{ours}.in_proj_{kind}"] = torch.cat([neighbours(q), neighbours(k), v])
            out = next(name for name in weights if name.startswith(attention) and name.endswith(f"proj.{kind}") and
                       not any(f"{part}_proj" in name for part in "qkv"))  # fmt: skip
            stored[f"{ours}.out_proj.{kind}"] = weights[out]
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "oracle").mkdir()
    save_file(weights, directory / "oracle" / "tower.safetensors")
    vision = {"width": 64, "layers": 3, "heads": 4, "mlp_ratio": 2.0, "image_size": WHOLE, "patch_size": 14}
    config = {"architectures": ["StepVLForConditionalGeneration"], "vision_config": vision}
    config |= {"understand_projector_stride": 2, "projector_bias": False, "text_config": {"hidden_size": OUT}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(SETTINGS))


def neighbours(x: torch.Tensor) -> torch.Tensor:
    """Rows of a projection whose halves of a head turn against each other, in the order where neighbours do."""
    return x.view(4, 2, -1, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


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


def perception_features(directory: Path, views: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    model = Step3p7VisionModel(perception_config()).eval()
    model.load_state_dict(load_file(directory / "oracle" / "tower.safetensors"))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    projector = load_file(directory / "model.safetensors")["vit_large_projector.weight"].to(dtype)
    return F.linear(model(views.to(dtype)).last_hidden_state, projector)


def step3_features(directory: Path, views: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The published forward, step by step, in float64 whatever `dtype`."""
    w = {name: tensor.double() for name, tensor in load_file(directory / "model.safetensors").items()}
    config = json.loads((directory / "config.json").read_text())["vision_config"]
    heads, width = config["num_attention_heads"], config["hidden_size"]
    p = "vision_model.embeddings."
    x = F.conv2d(views.double(), w[p + "patch_embedding.weight"], w[p + "patch_embedding.bias"], stride=14)
    side = x.shape[-1]
    x = x.flatten(2).transpose(1, 2)
    table = w[p + "position_embedding.weight"]
    grid = table[1:].T.reshape(1, width, WHOLE // 14, WHOLE // 14)
    if side != WHOLE // 14:
        grid = F.interpolate(grid.float(), (side, side), mode="bicubic", antialias=True, align_corners=False).double()
    first = (w[p + "class_embedding"] + table[:1]).expand(len(x), 1, width)
    x = torch.cat([first, first, first, first, x + grid[0].flatten(1).T], dim=1)
    for layer in range(config["num_hidden_layers"]):
        p = f"vision_model.transformer.layers.{layer}."
        q, k, v = (x @ w[p + "self_attn.qkv_proj.weight"].T + w[p + "self_attn.qkv_proj.bias"]).chunk(3, dim=-1)
        q, k, v = (y.view(*y.shape[:2], heads, -1).transpose(1, 2) for y in (q, k, v))
        attended = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-1) @ v
        attended = attended.transpose(1, 2).flatten(2)
        out = attended @ w[p + "self_attn.out_proj.weight"].T + w[p + "self_attn.out_proj.bias"]
        x = x + F.layer_norm(out, (width,), w[p + "layer_norm1.weight"], w[p + "layer_norm1.bias"], 1e-6)
        inner = x @ w[p + "mlp.fc1.weight"].T + w[p + "mlp.fc1.bias"]
        out = inner * torch.sigmoid(1.702 * inner) @ w[p + "mlp.fc2.weight"].T + w[p + "mlp.fc2.bias"]
        x = x + F.layer_norm(out, (width,), w[p + "layer_norm2.weight"], w[p + "layer_norm2.bias"], 1e-6)
    x = x[:, 4:].transpose(1, 2).reshape(len(x), width, side, side)
    x = F.conv2d(x, w["vit_downsampler.weight"], w["vit_downsampler.bias"], stride=2)
    x = F.conv2d(x, w["vit_downsampler2.weight"], w["vit_downsampler2.bias"], stride=2, padding=1)
    return x.flatten(2).transpose(1, 2) @ w["vit_large_projector.weight"].T + w["vit_large_projector.bias"]


def official_plan(width: int, height: int, whole: int, crop: int, largest: int) -> tuple[Any, ...]:
    """transformers' rule: whether it is squared, both sizes (width, height), the window, crops across and down."""
    squared = min(width, height) < 32 and max(width / height, height / width) > 4
    if squared:
        width = height = max(width, height)
    if max(height, width) > largest:
        scale = largest / max(height, width)
        width, height = int(width * scale), int(height * scale)
    short, long = min(height, width), max(height, width)
    if short == 0:
        return (squared, None)
    if long <= whole:
        window = short if long / short > 1.5 else 0
    elif long / short > 4:
        window = min(short, crop)
    else:
        window = crop
    if not window:
        return squared, (width, height), (width, height), 0, 0, 0
    snapped = tuple(
        window * (side // window + (side % window > 0.2 * window)) if side >= window else side
        for side in (width, height)
    )
    return squared, (width, height), snapped, window, max(1, snapped[0] // window), max(1, snapped[1] // window)


def official_views(pixels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole view and the crops, normalised, [n, 3, side, side], by Pillow and torch as the published code does."""
    height, width = pixels.shape[:2]
    squared, size, snapped, window, across, down = official_plan(width, height, WHOLE, CROP, 504)
    image = Image.fromarray(pixels)
    if squared:
        square = Image.new("RGB", (max(image.size),) * 2)
        square.paste(image, (0, 0))
        image = square
    image = image.resize(size, Image.Resampling.BILINEAR)
    crops = []
    if window:
        cut = image.resize(snapped, Image.Resampling.BILINEAR)
        corners = [(column * window, row * window) for row in range(down) for column in range(across)]
        crops = [cut.crop((left, top, left + window, top + window)) for left, top in corners]

    def values(view: Image.Image, side: int) -> torch.Tensor:
        scaled = torch.from_numpy(np.array(view)).permute(2, 0, 1).float() / 255
        normed = (scaled - torch.tensor(CLIP_MEAN)[:, None, None]) / torch.tensor(CLIP_STD)[:, None, None]
        if view.size == (side, side):
            return normed
        return F.interpolate(normed[None], (side, side), mode="bilinear", antialias=True, align_corners=False)[0]

    local = torch.stack([values(crop, CROP) for crop in crops]) if crops else torch.zeros(0, 3, CROP, CROP)
    return values(image, WHOLE)[None], local


def planned_views(planner: Any, pixels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The views that our planner makes, as the official ones are given."""
    plan = planner.plan(ImageItem(*pixels.shape[:2]))
    out = np.empty(plan.pixel_bytes, np.uint8)
    planner.fill_pixels(pixels, plan, out)
    levels = torch.from_numpy(out.view("<u2").astype(np.float64) / 256)
    end = WHOLE**2 * 3
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (CLIP_MEAN, CLIP_STD))
    whole, crops = (
        ((part.view(-1, side, side, 3).permute(0, 3, 1, 2) / 255 - mean) / std).float()
        for part, side in ((levels[:end], WHOLE), (levels[end:], CROP))
    )
    return whole, crops


@torch.inference_mode()
def expected_rows(
    directory: Path, views_of: Callable[[np.ndarray], Any], images: list[np.ndarray], dtype: torch.dtype
) -> torch.Tensor:
    features = perception_features if (directory / "oracle").is_dir() else step3_features
    rows = []
    for image in images:
        whole, crops = views_of(image)
        if len(crops):
            rows.append(features(directory, crops, dtype).flatten(0, 1))
        rows.append(features(directory, whole, dtype)[0])
    return torch.cat(rows).to(dtype)


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


IMAGES = [picture(100, 100), picture(112, 70, 1), picture(40, 300, 2), picture(300, 200, 3), picture(600, 10, 4)]
"""Without crops; of a small window; of a thin one; of several; too thin, hence squared, with 36."""


def engine_of(tower: Any, budgets: dict[str, tuple[int, ...]], use_graphs: bool = True) -> InProcessEngine:
    paths = tower.planner.paths
    tokens = {path: tuple(count * paths[path].tokens_per_unit for count in counts) for path, counts in budgets.items()}
    planned = plan_capacities(paths, explicit=tokens, cap=None, max_items=None, launches_by_segments=False)
    graphs = GraphManager(tower, planned)
    if use_graphs:
        with torch.inference_mode():
            graphs.capture(lambda *_: None, on_failure="fail")
            self_test(graphs, lambda *_: None)
    return InProcessEngine(tower, graphs, planned, use_graphs=use_graphs, slot_bytes=64 << 20)


def run(engine: InProcessEngine, images: list[np.ndarray]) -> torch.Tensor:
    planner = engine.tower.planner
    plans = [planner.plan(ImageItem(*image.shape[:2])) for image in images]
    pixels = [np.empty(plan.pixel_bytes, np.uint8) for plan in plans]
    for image, plan, out in zip(images, plans, pixels, strict=True):
        planner.fill_pixels(image, plan, out)
    items = engine.place(plans, pixels, "float32")
    engine.run(items)
    rows = torch.cat([engine.rows(item) for item in items])
    engine.free(items)
    return rows


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


def test_plans_follow_the_official_rule() -> None:
    planner: Any = build_planner(ModelSource("m", "step3p7", PRESETS["step-3.7-flash"], PROCESSORS["step3p7"], None))
    tried = [*sizes(504), (728, 728), (728, 485), (485, 728), (729, 729), (605, 2000), (10, 41), (31, 124), (31, 125)]
    assert len(tried) >= 2000
    for height, width in tried:
        squared, *rest = official_plan(width, height, 728, 504, 3024)
        if rest == [None]:
            with pytest.raises(PlanError, match="send a less narrow one"):
                planner.plan(ImageItem(height, width))
            continue
        size, snapped, window, across, down = rest
        cut = planner.cut(height, width)
        assert cut == (squared, size[::-1], snapped[::-1], window, down, across), (height, width)
        plan = planner.plan(ImageItem(height, width))
        assert plan.tokens == 169 + 81 * across * down == sum(span.rows for span in plan.spans)


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
    planned = plan_capacities(tower.planner.paths, explicit={}, cap=None, max_items=None, launches_by_segments=False)
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
