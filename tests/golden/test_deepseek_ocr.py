"""DeepSeek-OCR against the same tower in transformers, assembled as the model's own code does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import save_file
from transformers.models.unlimited_ocr.configuration_unlimited_ocr import UnlimitedOcrVisionConfig
from transformers.models.unlimited_ocr.modeling_unlimited_ocr import UnlimitedOcrVisionModel

from image_sizes import sizes
from opticnerve_server.bench.inprocess import InProcessEngine
from opticnerve_server.graphs import GraphManager, plan_capacities
from opticnerve_server.models.base import ImageItem
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.presets import PRESETS, PROCESSORS
from opticnerve_server.models.registry import ModelError, ModelSource, build_planner
from opticnerve_server.models.two_path import GLOBAL, LOCAL
from opticnerve_server.selftest import self_test
from opticnerve_server.types import Outcome
from oracles import randomise
from towers import assert_close, load_tower

WHOLE, CROP, OUT = 256, 192, 40
SETTINGS = {"base_size": WHOLE, "image_size": CROP, "max_crops": 6}
SMALL = (100, 150)
"""No side is longer than a crop."""


def official_config() -> Any:
    sam = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "mlp_dim": 128, "output_channels": 256,
        "global_attn_indexes": [0, 2], "downsample_channels": [40, 48], "image_size": WHOLE,
    }  # fmt: skip
    encoder = {"hidden_size": 48, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    encoder |= {"image_size": 42, "patch_size": 14}  # a table of 3 x 3: that of the crops, not that of the whole view
    return UnlimitedOcrVisionConfig(sam_config=sam, encoder_config=encoder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The official tower with random weights, as the published file has them."""
    directory = tmp_path_factory.mktemp("deepseek_ocr")
    model = UnlimitedOcrVisionModel(official_config())
    randomise(model, seed=3)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(4)
    for name, shape in (("projector.weight", (OUT, 96)), ("projector.bias", (OUT,))):
        weights[name] = torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
    for name in ("image_newline", "view_seperator"):
        weights[name] = torch.randn(OUT, generator=generator)
    torch.save(weights, directory / "oracle.pt")
    stored = {f"model.{published(name)}": tensor for name, tensor in weights.items() if ".k_proj." not in name}
    for name in [name for name in weights if ".q_proj." in name]:
        parts = [weights[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
        stored[f"model.{published(name)}"] = torch.cat(parts)
    stored = {name: tensor for name, tensor in stored.items() if ".v_proj." not in name}
    stored["model.vision_model.embeddings.patch_embedding.weight"] = torch.zeros(48, 3, 14, 14)
    stored["model.embed_tokens.weight"] = torch.zeros(8, OUT)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    sam = {"width": 32, "layers": 3, "heads": 4, "global_attn_indexes": [0, 2], "downsample_channels": [40, 48]}
    clip = {"width": 48, "layers": 2, "heads": 4, "image_size": 42, "patch_size": 14}
    config = {
        "architectures": ["DeepseekOCRForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "projector_config": {"projector_type": "linear", "input_dim": 96, "n_embed": OUT},
        "vision_config": {"image_size": WHOLE, "mlp_ratio": 3.7362, "width": {"sam_vit_b": sam, "clip-l-14-224": clip}},
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return directory


def published(name: str) -> str:
    for old, new in (
        ("sam_encoder.layers.", "sam_model.blocks."), ("sam_encoder.", "sam_model."), (".layer_norm1.", ".norm1."),
        (".layer_norm2.", ".norm2."), ("patch_embed.projection.", "patch_embed.proj."), ("neck.conv1.", "neck.0."),
        ("neck.norm1.", "neck.1."), ("neck.conv2.", "neck.2."), ("neck.norm2.", "neck.3."),
        ("sam_model.proj.conv1.", "sam_model.net_2."), ("sam_model.proj.conv2.", "sam_model.net_3."),
    ):  # fmt: skip
        name = name.replace(old, new) if name.startswith(("sam_encoder", "sam_model")) else name
    name = name.replace("projector.", "projector.layers.").replace(".q_proj.", ".qkv_proj.")
    return name.replace("vision_encoder.", "vision_model.").replace(".encoder.layers.", ".transformer.layers.")


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def official_grid(height: int, width: int, most: int, side: int) -> tuple[int, int]:
    """The rule of the model's code: columns and rows, (1, 1) for an image without crops."""
    if width <= side and height <= side:
        return 1, 1
    sides = range(1, most + 1)
    candidates = {(i, j) for i in sides for j in sides if 2 <= i * j <= most}
    found, nearest = (1, 1), float("inf")
    for i, j in sorted(candidates, key=lambda pair: pair[0] * pair[1]):
        off = abs(width / height - i / j)
        if off < nearest:
            nearest, found = off, (i, j)
        elif off == nearest and width * height > 0.5 * side * side * i * j:
            found = (i, j)
    return found


def official_views(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """The whole view, the crops, and how many there are across and down, by Pillow as in the model's code."""
    image = Image.fromarray(pixels)
    whole = np.asarray(ImageOps.pad(image, (WHOLE, WHOLE), color=(127, 127, 127)))
    across, down = official_grid(*pixels.shape[:2], 6, CROP)
    crops = []
    if (across, down) != (1, 1):
        resized = image.resize((CROP * across, CROP * down))
        for n in range(across * down):
            left, top = n % across * CROP, n // across * CROP
            crops.append(np.asarray(resized.crop((left, top, left + CROP, top + CROP))))
    return whole, np.array(crops, np.uint8).reshape(-1, CROP, CROP, 3), (across, down)


@torch.inference_mode()
def expected_rows(checkpoint: Path, images: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
    weights = {name: tensor.to(dtype) for name, tensor in torch.load(checkpoint / "oracle.pt").items()}
    model = UnlimitedOcrVisionModel(official_config()).to(dtype).eval()
    model.load_state_dict({k: v for k, v in weights.items() if k.startswith(("sam_encoder", "vision_encoder"))})

    def features(views: np.ndarray) -> torch.Tensor:
        values = ((torch.from_numpy(views.copy()).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5).to(dtype)
        seen = model(values).last_hidden_state
        return torch.nn.functional.linear(seen, weights["projector.weight"], weights["projector.bias"])

    rows = []
    newline, separator = weights["image_newline"], weights["view_seperator"]
    for image in images:
        whole, crops, (across, down) = official_views(image)
        if len(crops):
            local = features(crops)
            side = math.isqrt(local.shape[1])
            local = local.view(down, across, side, side, -1).permute(0, 2, 1, 3, 4)
            local = local.reshape(down * side, across * side, -1)
            rows.append(torch.cat([local, newline.expand(down * side, 1, -1)], dim=1).flatten(0, 1))
        seen = features(whole[None])[0]
        side = math.isqrt(len(seen))
        rows.append(torch.cat([seen.view(side, side, -1), newline.expand(side, 1, -1)], dim=1).flatten(0, 1))
        rows.append(separator[None])
    return torch.cat(rows)


IMAGES = [picture(*SMALL), picture(400, 300, 1), picture(200, 1000, 2), picture(193, 192, 3)]


def planned(tower: Any, images: list[np.ndarray]) -> tuple[list[Any], list[np.ndarray]]:
    plans, pixels = [], []
    for image in images:
        plan = tower.planner.plan(ImageItem(*image.shape[:2]))
        out = np.empty(plan.pixel_bytes, np.uint8)
        tower.planner.fill_pixels(image, plan, out)
        plans.append(plan)
        pixels.append(out)
    return plans, pixels


def engine_of(tower: Any, budgets: dict[str, tuple[int, ...]], use_graphs: bool = True) -> InProcessEngine:
    tokens = {
        path: tuple(units * tower.planner.paths[path].tokens_per_unit for units in units_of)
        for path, units_of in budgets.items()
    }
    planned = plan_capacities(
        tower.planner.paths, explicit=tokens, cap=None, max_items=None, launches_by_segments=False
    )
    graphs = GraphManager(tower, planned)
    if use_graphs:
        with torch.inference_mode():
            graphs.capture(lambda *_: None, on_failure="fail")
            self_test(graphs, lambda *_: None)
    return InProcessEngine(tower, graphs, planned, use_graphs=use_graphs, slot_bytes=64 << 20)


def run(engine: InProcessEngine, images: list[np.ndarray]) -> list[torch.Tensor]:
    items = engine.place(*planned(engine.tower, images), "float32")
    engine.run(items)
    rows = [engine.rows(item) for item in items]
    engine.free(items)
    return rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_transformers(checkpoint: Path, dtype: str) -> None:
    tower = load_tower(checkpoint, dtype)
    with engine_of(tower, {GLOBAL: (4,), LOCAL: (12,)}, use_graphs=False) as engine:
        found = torch.cat(run(engine, IMAGES)).to(tower.dtype)
    assert_close(found, expected_rows(checkpoint, IMAGES, getattr(torch, dtype)), tower)


def test_one_path_hits_while_the_other_falls_back(checkpoint: Path) -> None:
    tower = load_tower(checkpoint)
    small, tall, wide, square = IMAGES
    batches = [[small], [tall], [small, square, small], [small, small], [wide], [small]]
    with engine_of(tower, {GLOBAL: (1, 2, 3), LOCAL: (2, 4)}) as engine:
        for batch in batches:
            rows = run(engine, batch)
            assert_close(torch.cat(rows), expected_rows(checkpoint, batch, torch.float32), tower)
        outcomes = [{run.path: run.outcome for run in finished.runs} for finished in engine.batches]
    assert {GLOBAL: Outcome.HIT, LOCAL: Outcome.MISS} in outcomes, "an image of five crops, of which no graph has room"
    assert {GLOBAL: Outcome.HIT, LOCAL: Outcome.HIT} in outcomes
    assert outcomes[0] == {GLOBAL: Outcome.HIT}, "a small image leaves the local path alone"
    budgets = {run.budget for finished in engine.batches for run in finished.runs if run.path == GLOBAL}
    assert budgets == {1, 2, 3}


def test_replay_equals_eager_on_every_automatic_budget(tmp_path: Path) -> None:
    write_checkpoint("deepseek_ocr", tmp_path)
    tower = load_tower(tmp_path)
    planned = plan_capacities(tower.planner.paths, explicit={}, cap=None, max_items=None, launches_by_segments=False)
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
        across, down = official_grid(height, width, most, 640)
        tiled = (across, down) != (1, 1)
        assert planner.crops_of(plan) == ((down, across) if tiled else (0, 0)), (height, width)
        assert plan.tokens == 273 + tiled * (10 * down) * (10 * across + 1)
        assert sum(span.rows for span in plan.spans) == plan.tokens


@pytest.mark.parametrize("size", [(100, 150), (150, 100), (64, 64), (300, 900), (1, 999), (999, 1), (257, 255)])
def test_pixels_are_those_of_pillow(checkpoint: Path, size: tuple[int, int]) -> None:
    planner, image = load_tower(checkpoint).planner, picture(*size)
    plan = planner.plan(ImageItem(*size))
    out = np.full(plan.pixel_bytes, 7, np.uint8)
    planner.fill_pixels(image, plan, out)
    whole, crops, _ = official_views(image)
    end = plan.paths[GLOBAL].pixel_bytes
    assert np.array_equal(out[:end], whole.reshape(-1))
    assert np.array_equal(out[end:], crops.reshape(-1))


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
