"""Milliseconds of a call for an image whose rows are stored, beside the call that encoded it: gRPC on loopback.

    python -m opticnerve_server.bench.hits --model preset:qwen3-vl-2b

Every image is another one, sent three times in a row: as media (a miss), as media again (a hit, which hashes them but
neither decodes nor encodes), and as its digest alone. A time ends when the client has all rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import opticnerve
from opticnerve import Digest, Embedding

from ..config import Config
from ..local import LocalServer
from .images import jpeg, size

CALLS = ("miss", "hit", "digest")


def timed(client: opticnerve.Client, item: bytes | Digest) -> tuple[float, Embedding]:
    """Seconds of one call, and its answer."""
    started = time.perf_counter()
    (embedding,) = client.encode([item])
    return time.perf_counter() - started, embedding


def measure(address: str, images: Sequence[bytes]) -> tuple[dict[str, list[float]], int]:
    """Seconds of every call by its kind, and the bytes of an image's rows. Raises RuntimeError for what was no hit."""
    seconds: dict[str, list[float]] = {kind: [] for kind in CALLS}
    with opticnerve.Client(address) as client:
        timed(client, jpeg(64, 64, 0))  # connected
        for data in images:
            seconds["miss"].append((first := timed(client, data))[0])
            for kind, item in (("hit", data), ("digest", Digest(first[1].digest))):
                took, embedding = timed(client, item)
                seconds[kind].append(took)
                if not embedding.store_hit or embedding.array.tobytes() != first[1].array.tobytes():
                    raise RuntimeError(f"the {kind} was none: is the store large enough for one image (--store-bytes)?")
    return seconds, first[1].array.nbytes


def markdown(seconds: dict[str, list[float]]) -> str:
    """The table."""
    lines = ["| call | ms median | ms p95 | miss / this |", "|---|---|---|---|"]
    whole = statistics.median(seconds["miss"])
    for kind, times in seconds.items():
        median, p95 = statistics.median(times), sorted(times)[len(times) * 95 // 100]
        lines.append(f"| {kind} | {median * 1e3:.2f} | {p95 * 1e3:.2f} | {whole / median:.1f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="preset:NAME, for random weights, or a checkpoint directory")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--image", default=(1080, 1920), type=size, metavar="HEIGHTxWIDTH")
    parser.add_argument("--images", default=50, type=int, metavar="N")
    options = parser.parse_args(arguments)
    height, width = options.image
    images = [jpeg(height, width, seed) for seed in range(options.images)]
    load_format = "dummy" if options.model.startswith("preset:") else "safetensors"
    with LocalServer(Config(model=options.model, device=options.device, load_format=load_format)) as server:
        seconds, row_bytes = measure(server.address, images)
    print(f"{options.model}: {len(images)} images of {height} x {width} pixels, JPEGs of about ", end="")
    print(f"{statistics.mean(map(len, images)) / 1e3:.0f} kB, rows of {row_bytes / 1e6:.2f} MB\n")
    print(markdown(seconds))


if __name__ == "__main__":
    main()
