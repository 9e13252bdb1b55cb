"""Writes pixels.json for `test_pixels.py`: what the official torchvision-backed processors make of some images.

Continuous integration has no torchvision. To run this again, in an environment of its own:
    python -m venv pixels && pixels/bin/pip install torch torchvision "transformers==5.24.*"
    pixels/bin/python tests/golden/make_pixels.py
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FILE = Path(__file__).with_name("pixels.json")

HALF, CLIP_MEAN, CLIP_STD = [0.5] * 3, [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "patch_size": 16,
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "image_mean": HALF,
        "image_std": HALF,
    },
    "qwen2_5_vl": {
        "patch_size": 14,
        "size": {"shortest_edge": 3136, "longest_edge": 12845056},
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    },
    # Narrow limits, so that small images meet both of them.
    "narrow": {
        "patch_size": 14,
        "size": {"shortest_edge": 100 * 28 * 28, "longest_edge": 256 * 28 * 28},
        "image_mean": CLIP_MEAN,
        "image_std": HALF,
    },
}

# Height and width: equal to the grid already, both sides up, both down, one up and one down (where torch and Pillow
# differ most), half-way roundings, strips, tiny ones, and photograph sizes.
SIZES = {
    "qwen3_vl": [
        (256, 256), (512, 384), (500, 700), (427, 640), (640, 427), (400, 600), (304, 336), (272, 560),
        (20, 4000), (1999, 10), (1, 1), (3, 200), (480, 640), (1080, 1920),
    ],
    "qwen2_5_vl": [
        (56, 56), (336, 448), (427, 640), (640, 427), (600, 400), (70, 98), (126, 182), (960, 1280),
        (28, 5600), (1500, 8), (1, 1), (333, 111), (768, 1024),
    ],
    "narrow": [(427, 640), (640, 427), (1200, 37), (51, 60), (900, 1300), (448, 448)],
}  # fmt: skip


def synthetic_image(height: int, width: int) -> npt.NDArray[np.uint8]:
    """Slopes and hashed noise [height, width, 3], in integers alone: the same on every machine and version of numpy."""
    y, x, c = np.ogrid[:height, :width, :3]
    slopes = np.abs((y * (3 + c) + x * (7 - 2 * c) + 90 * c) % 510 - 255)
    noise = ((y * 73856093 ^ x * 19349663 ^ c * 83492791) * 2654435761 >> 16) % 96 - 48
    return np.clip(slopes + noise, 0, 255).astype(np.uint8)


def describe(pixel_values: npt.NDArray[np.float32]) -> dict[str, Any]:
    """SHA-256 of float32 [patches, channel x frame x y x x], little-endian, and [patch, column, value] of a few."""
    patches, columns = pixel_values.shape
    places = [(patches * i // 5, columns * i // 5) for i in range(5)]
    return {
        "sha256": hashlib.sha256(np.ascontiguousarray(pixel_values, "<f4").tobytes()).hexdigest(),
        "samples": [[row, column, float(pixel_values[row, column])] for row, column in places],
    }


def main() -> None:
    import torch
    import torchvision
    import transformers

    cases = []
    for name, settings in PROCESSORS.items():
        processor = transformers.Qwen2VLImageProcessor(**settings)
        for height, width in SIZES[name]:
            image = torch.from_numpy(synthetic_image(height, width)).permute(2, 0, 1)
            output = processor(image, input_data_format="channels_first", return_tensors="pt")
            case = {"processor": name, "size": [height, width], "grid": output.image_grid_thw[0].tolist()}
            cases.append(case | describe(output.pixel_values.numpy()))
    made_with = {module.__name__: module.__version__ for module in (torch, torchvision, transformers)}
    lines = ",\n".join(f"    {json.dumps(case)}" for case in cases)
    FILE.write_text(f'{{\n  "made_with": {json.dumps(made_with)},\n  "cases": [\n{lines}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
