"""MiniCPM-V, tower and resampler: transformers' Idefics2 and SigLIP pieces, and a float64 resampler of our own."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers.models.siglip import SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipEncoder

from opticnerve_server.bench.inprocess import InProcessEngine
from opticnerve_server.graphs import GraphManager, plan_capacities
from opticnerve_server.models.base import ImageItem, VideoItem
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.registry import ModelError
from opticnerve_server.selftest import self_test
from opticnerve_server.types import Launch, Outcome
from oracles import Media, randomise
from towers import PATH, assert_close, assert_items_independent, assert_padding_harmless, load_tower, run_tower

WIDTH, INNER, DEPTH, HEADS, OUT, SIDE = 48, 80, 3, 4, 256, 9
VERSIONS: dict[str, dict[str, Any]] = {
    "2.5": {"query_num": 5},
    "2.6": {"query_num": 4, "version": 2.6},
    "4.0": {"query_num": 4, "version": 4.0, "drop_vision_last_layer": True},
}
SIZES = [(56, 56), (30, 300), (300, 100), (1, 1), (200, 150), (9, 900), (112, 60)]


@pytest.fixture(scope="module", params=VERSIONS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the authors' names, every weight random."""
    directory, top = tmp_path_factory.mktemp(request.param), VERSIONS[request.param]
    top = {"drop_vision_last_layer": False, "hidden_size": OUT, **top}
    queries, depth = top["query_num"], DEPTH - top["drop_vision_last_layer"]
    config = SiglipVisionConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=depth, num_attention_heads=HEADS
    )
    encoder = SiglipEncoder(config)
    randomise(encoder, seed=1)
    stored = {f"vpm.encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
    generator = torch.Generator().manual_seed(queries)
    shapes: dict[str, tuple[int, ...]] = {
        "vpm.embeddings.patch_embedding.weight": (WIDTH, 3, 14, 14), "vpm.embeddings.patch_embedding.bias": (WIDTH,),
        "vpm.embeddings.position_embedding.weight": (SIDE**2, WIDTH),
        "vpm.post_layernorm.weight": (WIDTH,), "vpm.post_layernorm.bias": (WIDTH,),
        "vpm.head.probe": (1, 1, WIDTH), "resampler.pos_embed": (queries, OUT),
        "resampler.query": (queries, OUT), "resampler.kv_proj.weight": (OUT, WIDTH), "resampler.proj": (OUT, OUT),
        "resampler.attn.in_proj_weight": (3 * OUT, OUT), "resampler.attn.in_proj_bias": (3 * OUT,),
        "resampler.attn.out_proj.weight": (OUT, OUT), "resampler.attn.out_proj.bias": (OUT,),
        **{f"resampler.ln_{n}.{p}": (OUT,) for n in ("q", "kv", "post") for p in ("weight", "bias")},
    }  # fmt: skip
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        norm = len(shape) == 1 and name.endswith("weight")
        size = 1.0 if name.endswith(("query", "embedding.weight")) and len(shape) == 2 else math.prod(shape[1:]) ** -0.5
        stored[name] = 1 + 0.2 * noise if norm else 0.2 * noise if len(shape) == 1 else noise * size
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, directory / "model.safetensors")
    vision = {
        "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS,
        "image_size": 14 * SIDE, "patch_size": 14,
    }  # fmt: skip
    files = {
        "config.json": {"architectures": ["MiniCPMV"], "model_type": "minicpmv", "vision_config": vision, **top},
        "preprocessor_config.json": {"scale_resolution": 56, "image_feature_size": queries},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def media_of(planner: Any, size: tuple[int, int], seed: int, frames: int = 0) -> Media:
    """Noise of a size, as the slices that the planner makes of it, flat."""
    noise = np.random.default_rng(seed).integers(0, 256, (frames or 1, *size, 3), dtype=np.uint8)
    plan = planner.plan(VideoItem(frames, 1.0, *size) if frames else ImageItem(*size))
    out = np.empty(plan.pixel_bytes, np.uint8)
    planner.fill_pixels(noise if frames else noise[0], plan, out)
    return Media(plan, out)


def batch_of(tower: Any, sizes: Sequence[tuple[int, int]] = SIZES) -> list[Media]:
    batch = [media_of(tower.planner, size, seed) for seed, size in enumerate(sizes)]
    if "video" in tower.planner.modalities:
        batch.append(media_of(tower.planner, (50, 90), 99, frames=3))
    return batch


def slices_of(media: Media) -> list[np.ndarray[Any, Any]]:
    begin, found = 0, []
    for h, w in media.plan.grids:
        end = begin + h * w * 14 * 14 * 3
        found.append(media.frames[begin:end].reshape(14 * h, 14 * w, 3))
        begin = end
    assert begin == media.frames.size
    return found


@torch.inference_mode()
def expected_rows(checkpoint: Path, batch: Sequence[Media], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One slice at a time: transformers' encoder in `dtype`, the resampler in float64 where that is float32."""
    top = json.loads((checkpoint / "config.json").read_text())
    p = {k: v.to(dtype) for k, v in load_file(checkpoint / "model.safetensors").items()}
    config = SiglipVisionConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_attention_heads=HEADS,
        num_hidden_layers=DEPTH - top["drop_vision_last_layer"],
    )  # fmt: skip
    config._attn_implementation = "eager"
    encoder = SiglipEncoder(config).to(dtype).eval()
    encoder.load_state_dict({k.removeprefix("vpm.encoder."): v for k, v in p.items() if ".encoder." in k})
    rows = []
    for pixels in (pixels for media in batch for pixels in slices_of(media)):
        h, w = pixels.shape[0] // 14, pixels.shape[1] // 14
        values = ((torch.from_numpy(pixels).permute(2, 0, 1).float() / 255 - 0.5) / 0.5).to(dtype)
        weight, bias = (p[f"vpm.embeddings.patch_embedding.{n}"] for n in ("weight", "bias"))
        x = F.conv2d(values[None], weight, bias, stride=14)[0].flatten(1).T
        if "version" in top:
            ids = [i * SIDE // h * SIDE + j * SIDE // w for i in range(h) for j in range(w)]
        else:
            ids = [k * SIDE // (h * w) for k in range(h * w)]
        x = x + p["vpm.embeddings.position_embedding.weight"][ids]
        x = encoder(inputs_embeds=x[None]).last_hidden_state[0]
        x = F.layer_norm(x, (WIDTH,), p["vpm.post_layernorm.weight"], p["vpm.post_layernorm.bias"], 1e-6)
        wide = torch.float64 if dtype == torch.float32 else dtype
        r = {k.removeprefix("resampler."): v.to(wide) for k, v in p.items() if k.startswith("resampler.")}
        rows.append(resampled(x.to(wide), h, w, r).to(dtype))
    return torch.cat(rows)


def resampled(x: torch.Tensor, h: int, w: int, r: dict[str, torch.Tensor]) -> torch.Tensor:
    """The resampler of one slice by its description: positions of columns first, on keys alone; heads of 128."""

    def norm(value: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(value, (OUT,), r[f"ln_{name}.weight"], r[f"ln_{name}.bias"], 1e-6)

    omega = 10000.0 ** -(np.arange(OUT // 4) / (OUT / 4))
    column, row = np.tile(np.arange(w), h)[:, None] * omega, np.repeat(np.arange(h), w)[:, None] * omega
    table = np.concatenate([np.sin(column), np.cos(column), np.sin(row), np.cos(row)], axis=1)
    kv, q = norm(x @ r["kv_proj.weight"].T, "kv"), norm(r["query"], "q")
    attention = torch.nn.MultiheadAttention(OUT, OUT // 128, batch_first=True, dtype=x.dtype)
    attention.load_state_dict({k.removeprefix("attn."): v for k, v in r.items() if k.startswith("attn.")})
    attended, _ = attention(q[None], (kv + torch.from_numpy(table).to(x.dtype))[None], kv[None])
    return norm(attended[0], "post") @ r["proj"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_transformers_and_the_resampler(checkpoint: Path, dtype: str) -> None:
    tower = load_tower(checkpoint, dtype)
    batch = batch_of(tower)
    assert_close(run_tower(tower, batch), expected_rows(checkpoint, batch, getattr(torch, dtype)), tower)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_item_does_not_depend_on_its_batch(checkpoint: Path, dtype: str) -> None:
    tower = load_tower(checkpoint, dtype)
    assert_items_independent(tower, batch_of(tower))


def test_padding_changes_nothing(checkpoint: Path) -> None:
    tower = load_tower(checkpoint)
    batch = batch_of(tower, SIZES[1:4])
    assert_padding_harmless(tower, batch, expected_rows(checkpoint, batch))


@pytest.mark.parametrize("launch", [Launch.ROWS, Launch.TILES])
def test_graphs_give_the_rows_of_the_eager_forward(checkpoint: Path, launch: Launch) -> None:
    """Small, large, small; an item of more slices than any budget goes as parts, one of an extreme aspect eagerly."""
    tower = load_tower(checkpoint)
    paths = tower.planner.paths
    planned = plan_capacities(paths, explicit={"": (8, 24, 64)}, cap=None, max_items=None, launch=launch)
    graphs = GraphManager(tower, planned)
    tried: list[Any] = []
    with torch.inference_mode():
        graphs.capture(lambda *_: None, on_failure="fail")
        self_test(graphs, lambda path, capacity: tried.append(capacity))
    assert len(tried) == len(planned[PATH])
    small, cut, wide, other, extreme, *_ = (
        media_of(tower.planner, size, 7) for size in [*SIZES[:3], (56, 60), (1, 900)]
    )
    capacities = {PATH: graphs.paths[PATH].capacities}
    with InProcessEngine(tower, graphs, capacities, use_graphs=True, slot_bytes=64 << 20) as engine:
        for batch in ([small], [cut, small, other], [wide, cut, small, other], [extreme], [small]):
            items = engine.place([media.plan for media in batch], [media.frames for media in batch], "float32")
            engine.run(items)
            for item, media in zip(items, batch, strict=True):
                assert_close(engine.rows(item), run_tower(tower, [media]), tower)
            engine.free(items)
    runs = [run for finished in engine.batches for run in finished.runs]
    assert {run.outcome for run in runs if run.load.longest <= 64} == {Outcome.HIT}
    assert runs[0].budget == runs[-1].budget == 8


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", 4.5), ("version", "2.0"), ("query_num", None), ("drop_vision_last_layer", None),
        ("hidden_size", 100), ("vision_config.hidden_act", "gelu"), ("vision_config.intermediate_size", None),
    ],
)  # fmt: skip
def test_configurations_that_are_refused_by_name(key: str, value: object, tmp_path: Path) -> None:
    write_checkpoint("minicpmv", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    section, _, name = key.rpartition(".")
    (config[section] if section else config)[name] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=name):
        load_tower(tmp_path)
