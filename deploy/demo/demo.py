"""From nothing to embeddings, on the CPU: what `make demo` runs.

Writes a small checkpoint with random weights, serves it on loopback, encodes photographs with the `opticnerve` command,
and compares every row with an eager forward of the same tower in this process.

    python deploy/demo/demo.py [IMAGE ...]      # your own images instead of those beside this file
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from opticnerve_server.bench.inprocess import InProcessEngine
from opticnerve_server.config import Config
from opticnerve_server.graphs import GraphManager, plan_capacities
from opticnerve_server.media import decode
from opticnerve_server.models import registry
from opticnerve_server.models.base import ImageItem

BIN = Path(sys.executable).parent
CONFIG = Config(model="demo")  # the defaults that the server decodes with


def main() -> int:
    """The demo; returns its exit code."""
    here = Path(__file__).parent
    images = [Path(name) for name in sys.argv[1:]] or sorted(
        path for path in here.iterdir() if path.suffix in (".jpg", ".png", ".webp")
    )
    for image in images:
        if not image.is_file():
            raise SystemExit(f"demo: there is no file {image}")
    with tempfile.TemporaryDirectory() as folder:
        model, out = Path(folder, "model"), Path(folder, "rows.safetensors")
        print("A small Qwen3-VL with RANDOM weights: its rows mean nothing, but are computed as real ones are.")
        run("opticnerve-server", "make-checkpoint", "--arch", "qwen3_vl", "--out", str(model))
        with serve(model) as address:
            run(
                "opticnerve",
                "encode",
                "--server",
                address,
                "--dtype",
                "float32",
                "--out",
                str(out),
                *map(os.path.relpath, images),
            )
        with safe_open(out, framework="numpy") as rows:
            records = [json.loads(rows.metadata()[str(i)]) for i in range(len(images))]
            served = [rows.get_tensor(str(i)) for i in range(len(images))]
        eager = encode_eagerly(model, images)
    error = max(relative_error(mine, reference) for mine, reference in zip(served, eager, strict=True))
    hits = sum(record["outcome"] == "replay" for record in records)
    print(f"encoded {len(images)} items: {hits} hits, {len(images) - hits} misses, max error {error:.1e} against eager")
    return 0 if error < 1e-4 else 1


def run(*command: str) -> None:
    """Show a command and run it. Where it fails, the demo ends with its exit code."""
    print("$", *command, flush=True)
    code = subprocess.run([BIN / command[0], *command[1:]]).returncode
    if code:
        print(f"demo: {command[0]} {command[1]} ended with exit code {code}", file=sys.stderr)
        raise SystemExit(code)


@contextmanager
def serve(model: Path) -> Iterator[str]:
    """A server on loopback, from ready to stopped."""
    command = ["opticnerve-server", "serve", "--model", str(model), "--device", "cpu", "--drain-delay", "0"]
    for port in ("--listen", "--health-listen", "--metrics-listen"):
        command += [port, "127.0.0.1:0"]
    print("$", *command, flush=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPTICNERVE_")}
    server = subprocess.Popen([BIN / command[0], *command[1:]], stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    try:
        address = ""
        for line in server.stdout:
            record = json.loads(line)
            if record["event"] == "listening":
                address = record["listen"]
            if record["event"] in ("phase", "ready", "graphs ready"):
                print("  ", {k: v for k, v in record.items() if k not in ("ts", "level", "logger")}, flush=True)
            if record["event"] == "ready":
                break
        else:
            raise SystemExit(f"the server ended with exit code {server.wait()} before it was ready")
        threading.Thread(target=server.stdout.read, daemon=True).start()  # a full pipe would stop the server
        yield address
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    if code:
        raise SystemExit(f"the server ended with exit code {code}")


def encode_eagerly(model: Path, images: list[Path]) -> list[np.ndarray]:
    """Each image through the same tower without graphs, alone: float32 [tokens, width]."""
    source = registry.open_model(str(model), "safetensors")
    planner = registry.build_planner(source)
    loaded = registry.build_tower(
        source,
        planner,
        load_format="safetensors",
        device="cpu",
        dtype="float32",
        attention_backend="sdpa",
        kernels="auto",
    )
    capacities = plan_capacities(planner.paths, explicit={}, cap=64, max_items=1, launch=loaded.launch)
    rows = []
    graphs = GraphManager(loaded.tower, capacities)
    with InProcessEngine(loaded.tower, graphs, capacities, use_graphs=False, slot_bytes=256 << 20) as engine:
        for image in images:
            pixels = decode.decode(
                image.read_bytes(), max_pixels=CONFIG.max_image_pixels, background=CONFIG.alpha_background
            )
            plan = planner.plan(ImageItem(*pixels.shape[:2]))
            resized = np.empty(plan.pixel_bytes, np.uint8)
            planner.fill_pixels(pixels, plan, resized)
            items = engine.place([plan], [resized], "float32")
            engine.run(items)
            rows.append(engine.rows(items[0]).numpy())
            engine.free(items)
    return rows


def relative_error(mine: np.ndarray, reference: np.ndarray) -> float:
    """Norm of the difference by norm of the reference."""
    return float(np.linalg.norm(mine - reference) / np.linalg.norm(reference))


if __name__ == "__main__":
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    sys.exit(main())
