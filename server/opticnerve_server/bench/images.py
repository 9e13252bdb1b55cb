"""Pictures for the benches, and how a command line says their size."""

from __future__ import annotations

import argparse
import io

import numpy as np
from PIL import Image


def size(text: str) -> tuple[int, int]:
    """Height and width, of what a user writes as 480x640. Raises argparse.ArgumentTypeError."""
    height, _, width = text.partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write height x width in pixels, such as 480x640")
    return int(height), int(width)


def jpeg(height: int, width: int, seed: int) -> bytes:
    """An image with structure of a few sizes, so that it has about as many bytes as a photograph."""
    random, pixels = np.random.default_rng(seed), np.zeros((height, width, 3))
    for side in (4, 16, 64, 256):
        coarse = random.integers(0, 256, (side, side, 3), np.uint8)
        pixels += np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.float64) / 4
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()
