"""Prints the checksums that `test_patches.py` compares with, made by the official torchvision-backed processors.

Run in an environment with transformers and torchvision; continuous integration has none:
    PYTHONPATH=server:tests python tests/golden/official_patches.py
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

SIZES = {"qwen3_vl": [(32, 32), (64, 224), (352, 96)], "qwen2_5_vl": [(28, 28), (56, 196), (308, 84)]}


def pattern(height: int, width: int) -> npt.NDArray[np.uint8]:
    """An image that takes every value in every channel once it has 256 pixels, by arithmetic alone."""
    index = np.arange(height * width * 3, dtype=np.int64)
    return ((index * 7 + index // 768 * 13) % 256).astype(np.uint8).reshape(height, width, 3)


def checksum(patches: npt.NDArray[np.float32]) -> str:
    """SHA-256 of float32 [rows, channel x frame x row x column], little-endian."""
    return hashlib.sha256(np.ascontiguousarray(patches, dtype="<f4").tobytes()).hexdigest()


def main() -> None:
    import torch
    from transformers import Qwen2VLImageProcessor

    from opticnerve_server.models.presets import PROCESSORS

    for architecture, sizes in SIZES.items():
        settings = {key: value for key, value in PROCESSORS[architecture].items() if key != "image_processor_type"}
        processor = Qwen2VLImageProcessor(**settings)
        for height, width in sizes:
            image = torch.from_numpy(pattern(height, width)).permute(2, 0, 1)
            pixel_values = processor(image, do_resize=False, return_tensors="pt").pixel_values
            print(f'    ("{architecture}", {height}, {width}): "{checksum(pixel_values.numpy())}",')


if __name__ == "__main__":
    main()
