"""Milliseconds of one encode call in process: replay and eager through the dispatcher, beside transformers eager.

    python -m opticnerve_server.bench.tower --model preset:qwen3-vl-8b --transformers

A call begins when the pixels are in the slots and ends when the rows are, so host work and both copies are in it. Eager
is one forward of the whole batch; replay is what the dispatcher does, several full graphs for a long clip. The
transformers column runs its vision model with the same weights, pixels already patched and on the device, and ends when
the device is done: it has less to do. `error` is the relative difference (norm ratio) of our rows to its. `bench.paths`
has the forwards of each path alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .. import kernels
from ..attention import resolve
from ..config import CPU_TOKEN_CAP, GPU_TOKEN_CAP
from ..graphs import GraphManager, eager_capacity, plan_capacities
from ..models import registry
from ..models.base import ImageItem, Tower, VideoItem
from ..models.weights import DummyTensors
from ..selftest import self_test
from ..types import Capacity, ItemPlan, Load
from .inprocess import InProcessEngine

Media = ImageItem | VideoItem


def stills(count: int, side: int) -> list[Media]:
    return [ImageItem(side, side)] * count


def clip(frames: int) -> list[Media]:
    """One 360p clip, every frame of which is sampled."""
    return [VideoItem(frames, 2.0, 360, 640)]


BATCHES: dict[str, list[Media]] = {
    "1x224": stills(1, 224),
    "1x336": stills(1, 336),
    "4x336": stills(4, 336),
    "8x336": stills(8, 336),
    "20x336": stills(20, 336),
    "1x672": stills(1, 672),
    "8x672": stills(8, 672),
    "1x1344": stills(1, 1344),
    "1x2048": stills(1, 2048),
    "mixed8": [ImageItem(side, side) for side in (224, 336, 448, 560, 672, 896, 1120, 1344)],
    "clip8": clip(8),
    "clip32": clip(32),
    "clip128": clip(128),
    "clip768": clip(768),
    "clip32+4x336": [*clip(32), *stills(4, 336)],
}
STILLS = [name for name in BATCHES if "clip" not in name and name != "mixed8"]


class RecordingTensors(DummyTensors):
    """Dummy weights that are kept by name, for the reference."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.taken: dict[str, torch.Tensor] = {}

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """See `TensorSource.take`."""
        self.taken[name] = super().take(name, *shape)
        return self.taken[name]


def build(
    model: str, device: torch.device, dtype: torch.dtype, backend: str, between: str
) -> tuple[Tower, RecordingTensors, Any]:
    """A tower with dummy weights, these weights, and the vision_config of the model. `between` are its kernels."""
    source = registry.open_model(model, "dummy")
    planner = registry.build_planner(source)
    tensors = RecordingTensors(device, dtype)
    cls = registry.tower_class(source.architecture)
    config = cls.read_config(source.config)
    attention, reason = resolve(backend, device, dtype, config.head_dim)
    print(f"attention: {attention.name}, {reason}")
    reason = kernels.choose(between, device)
    print(f"kernels: {kernels.chosen(device)}, {reason}")
    return cls(config, planner, tensors, attention), tensors, source


def reference(source: Any, tensors: RecordingTensors) -> Callable[..., torch.Tensor]:
    """The vision model of transformers with the same weights: (pixel_values, grid_thw) to rows [tokens, width]."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(**source.config)
    with torch.device("meta"):  # the whole model without its memory, to learn the class of its tower
        cls = type(AutoModelForImageTextToText.from_config(config).model.visual)  # type: ignore[no-untyped-call]
    with torch.device(tensors.device):
        model = cls._from_config(config.vision_config, attn_implementation="sdpa")
    # Cast parameters one by one: `model.to(dtype)` would round the float32 rope frequencies as well.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(tensors.dtype)
    model.load_state_dict(tensors.taken)
    model.eval()

    def run(pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        output = model(pixel_values, grid_thw=grid_thw)
        return torch.cat([output.pooler_output, *(getattr(output, "deepstack_features", None) or [])], dim=-1)

    return run


def official_patches(planner: Any, plan: ItemPlan, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """pixel_values of one item as the official processor lays them out, [rows, 3 * temporal_patch * patch^2]."""
    p, m, pair = planner.patch, planner.merge, planner.temporal_patch
    frames = pixels.reshape(-1, plan.height, plan.width, 3)
    frames = np.concatenate([frames, np.repeat(frames[-1:], plan.grid[0] * pair - len(frames), axis=0)])
    scaled = (frames - np.float32(255) * np.array(planner.mean, np.float32)) / (
        np.float32(255) * np.array(planner.std, np.float32)
    )
    t, h, w = plan.grid
    cut = scaled.reshape(t, pair, h // m, m, p, w // m, m, p, 3).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    patches: npt.NDArray[np.float32] = cut.reshape(t * h * w, -1)
    return patches


def median_ms(run: Callable[[], float], repeats: int) -> tuple[float, float]:
    """Median and 99th percentile in milliseconds of `repeats` runs that return seconds, after two warm-ups."""
    for _ in range(2):
        run()
    times = sorted(run() * 1e3 for _ in range(repeats))
    return statistics.median(times), times[min(len(times) - 1, int(len(times) * 0.99))]


def measure(engine: InProcessEngine, plans: Sequence[ItemPlan], repeats: int) -> tuple[dict[str, Any], torch.Tensor]:
    """One batch through the dispatcher: its row of the table and its rows."""
    items = engine.place(plans, random_pixels(plans), "bfloat16")
    engine.batches.clear()

    def run() -> float:
        # Again from the state in which the batcher takes an item, without paying for slots and pixels twice.
        return engine.run(items)

    median, p99 = median_ms(run, repeats)
    row = {
        "ms": round(median, 3),
        "p99": round(p99, 3),
        "device_ms": round(statistics.median(b.execute_s for b in engine.batches) * 1e3, 3),
        "budget": engine.batches[0].runs[0].budget,
        "dispatches": len(engine.batches) / (repeats + 2),
    }
    rows = torch.cat([engine.rows(item) for item in items])
    engine.free(items)
    return row, rows


def random_pixels(plans: Sequence[ItemPlan]) -> list[npt.NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, plan.pixel_bytes, dtype=np.uint8) for plan in plans]


def measure_reference(
    run: Callable[..., torch.Tensor], planner: Any, plans: Sequence[ItemPlan], device: torch.device, repeats: int
) -> tuple[float, torch.Tensor]:
    """Median milliseconds of the reference and its rows."""
    pairs = zip(plans, random_pixels(plans), strict=True)
    patches = np.concatenate([official_patches(planner, plan, pixels) for plan, pixels in pairs])
    pixel_values = torch.from_numpy(patches).to(device)
    grid = torch.tensor([plan.grid for plan in plans], device=device)

    def once() -> float:
        started = time.perf_counter()
        run(pixel_values, grid)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    median, _ = median_ms(once, repeats)
    return round(median, 3), run(pixel_values, grid).cpu()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preset:qwen3-vl-8b", help="preset:NAME or a directory with config.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--kernels", default="auto", choices=kernels.NAMES)
    parser.add_argument("--max-token-budget", type=int, help="largest captured budget")
    parser.add_argument("--batches", nargs="*", default=STILLS, choices=list(BATCHES))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--transformers", action="store_true", help="also run transformers' vision model")
    parser.add_argument("--json", help="write the table to this file")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    with torch.inference_mode():
        table = run_table(options, device, getattr(torch, options.dtype))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(table, file, indent=1)


def run_table(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Build, capture, test and measure."""
    started = time.perf_counter()
    tower, tensors, source = build(options.model, device, dtype, options.attention_backend, options.kernels)
    loaded = time.perf_counter()
    cap = options.max_token_budget or (GPU_TOKEN_CAP if device.type == "cuda" else CPU_TOKEN_CAP)
    by_segments = resolve(options.attention_backend, device, dtype, 64)[0].launches_by_segments
    capacities = plan_capacities(
        tower.planner.paths, explicit={}, cap=cap, max_items=None, launches_by_segments=by_segments
    )
    graphs = GraphManager(tower, capacities)
    estimate = graphs.estimate()
    graphs.capture(lambda *_: None, on_failure="fail")
    captured = time.perf_counter()
    tested: list[Capacity] = []
    self_test(graphs, lambda path, capacity: tested.append(capacity))
    done = time.perf_counter()
    summary: dict[str, Any] = {
        "model": source.name,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "graphs": sum(len(state.graphs) for state in graphs.paths.values()),
        "tested": len(tested),
        "load_s": round(loaded - started, 2),
        "capture_s": round(captured - loaded, 2),
        "selftest_s": round(done - captured, 2),
        "graph_memory_mib": sum(state.memory_bytes for state in graphs.paths.values()) >> 20,
        "estimate_mib": estimate >> 20,
    }
    print(json.dumps(summary))
    summary["rows"] = [_row(name, options, tower, tensors, source, graphs, capacities) for name in options.batches]
    return summary


def _row(
    name: str,
    options: argparse.Namespace,
    tower: Tower,
    tensors: RecordingTensors,
    source: Any,
    graphs: GraphManager,
    capacities: dict[str, list[Capacity]],
) -> dict[str, Any]:
    plans = [tower.planner.plan(media) for media in BATCHES[name]]
    row: dict[str, Any] = {"batch": name, "tokens": sum(plan.tokens for plan in plans)}
    whole = {
        path: [eager_capacity(spec, Load.of(plan.paths[path] for plan in plans))]
        for path, spec in tower.planner.paths.items()
    }
    for label, bounds in (("replay", capacities), ("eager", whole)):
        with InProcessEngine(tower, graphs, bounds, use_graphs=label == "replay") as engine:
            result, rows = measure(engine, plans, options.repeats)
        if label == "eager" or result["budget"]:  # else it is above the cap and eager anyway
            row[label] = result
    if options.transformers:
        run = _reference(source, tensors)
        row["transformers_ms"], expected = measure_reference(run, tower.planner, plans, tower.device, options.repeats)
        row["error"] = float(f"{(rows.float() - expected.float()).norm() / expected.float().norm():.2e}")
    print(json.dumps(row))
    sys.stdout.flush()
    return row


_references: dict[str, Callable[..., torch.Tensor]] = {}


def _reference(source: Any, tensors: RecordingTensors) -> Callable[..., torch.Tensor]:
    if source.name not in _references:
        _references[source.name] = reference(source, tensors)
    return _references[source.name]


if __name__ == "__main__":
    main()
