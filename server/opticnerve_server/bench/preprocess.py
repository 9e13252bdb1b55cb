"""What an image costs on a CPU before the device sees it: milliseconds of decoding, resizing into the slot and hashing.

    opticnerve-server bench preprocess --model preset:qwen3-vl-8b --sizes 336x336 1080x1920

One thread, as each of `--preprocess-threads` is; the last column is how many such images a core prepares in a second.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from opticnerve.digests import digest_of
from opticnerve.v1 import encoder_pb2 as pb

from ..media.decode import decode
from ..models import registry
from ..models.base import ImageItem, Planner
from .images import jpeg, size
from .timing import repeated

MAX_PIXELS = 1 << 28


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="opticnerve-server bench preprocess",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="preset:qwen3-vl-8b", help="preset:NAME or a directory with config.json")
    sizes = [(336, 336), (672, 672), (1080, 1920), (3024, 4032)]
    parser.add_argument("--sizes", nargs="+", default=sizes, type=size, metavar="HEIGHTxWIDTH")
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="whose median is taken. Default 20")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    planner = registry.build_planner(registry.open_model(options.model, "dummy"))
    print("| JPEG | kB | tokens | decode ms | resize ms | hash ms | together | images/s a core |")
    print("|---|---|---|---|---|---|---|---|")
    for height, width in options.sizes:
        data = jpeg(height, width, 0)
        tokens, took = measure(planner, data, options.repeats)
        shown = " | ".join(f"{ms:.2f}" for ms in (*took, sum(took)))
        print(f"| {height}x{width} | {len(data) / 1e3:.0f} | {tokens} | {shown} | {1e3 / sum(took):.0f} |", flush=True)


def measure(planner: Planner, data: bytes, repeats: int) -> tuple[int, list[float]]:
    """The tokens of an image file, and the milliseconds of each step."""

    def decoded() -> npt.NDArray[np.uint8]:
        return decode(data, max_pixels=MAX_PIXELS, background="#ffffff")

    pixels = decoded()
    plan = planner.plan(ImageItem(*pixels.shape[:2]))
    room = np.empty(plan.pixel_bytes, np.uint8)
    item = pb.Item(encoded_image=pb.EncodedImage(data=data))
    steps: list[Callable[[], object]] = [
        decoded,
        lambda: planner.fill_pixels(pixels, plan, room),
        lambda: digest_of(item),
    ]
    return plan.tokens, [repeated(partial(_seconds, step), repeats).median for step in steps]


def _seconds(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
