"""Writes tiles.json for `test_tiles.py`: how the official image processor of Llama 4 cuts images into tiles.

It needs torchvision, which continuous integration has not. To run this again, in an environment of its own:
    python -m venv tiles && tiles/bin/pip install torch torchvision "transformers==5.24.*"
    PYTHONPATH=tests tiles/bin/python tests/golden/make_tiles.py
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from golden.make_pixels import synthetic_image
from image_sizes import sizes

FILE = Path(__file__).with_name("tiles.json")

SIDE = 336
SETTINGS: list[dict[str, Any]] = [
    {},
    {"resize_to_max_canvas": True},
    {"max_patches": 5},
    {"max_patches": 1},
]
PICTURES = [(336, 336), (300, 500), (1, 1), (1000, 90), (700, 1100)]
"""Heights and widths of the images whose pixels are compared."""


def all_sizes(settings: dict[str, Any]) -> list[tuple[int, int]]:
    """Over 2000, and for other than the default settings every seventh of them: whole canvases and those beside too."""
    canvases = [(SIDE * rows, SIDE * columns) for rows in range(1, 9) for columns in range(1, 9)]
    beside = [(h + i, w + j) for h, w in canvases for i in (-1, 0, 1) for j in (-1, 0, 1)]
    halves = [(round(h * s), round(w * s)) for h, w in canvases for s in (0.25, 0.5, 1.5, 1 / 3, 2 / 3)]
    return [*sizes(14), *beside, *halves][:: 7 if settings else 1]


def official(settings: dict[str, Any], images: list[tuple[int, int]]) -> Iterator[list[int]]:
    """Rows and columns of tiles, and height and width of the picture on them, of images of these sizes.

    The processor runs whole, but for what it does with pixels.
    """
    import torch
    from transformers.models.llama4 import image_processing_llama4 as llama4

    class Sizes(llama4.Llama4ImageProcessor):  # type: ignore[misc]
        def resize(self, image: Any, size: Any, **_: Any) -> Any:
            asked.append((size.height, size.width))
            return torch.zeros(1, 3, size.height, size.width, dtype=torch.uint8)

        def rescale_and_normalize(self, images: Any, *_: Any) -> Any:
            return images

    llama4.group_images_by_shape = lambda images, **_: ({"all": images[0][None]}, None)
    llama4.reorder_images = lambda grouped, _: [grouped["all"]]
    processor = Sizes(**settings)
    options = {name: getattr(processor, name) for name in ("max_patches", "resize_to_max_canvas")}
    for height, width in images:
        asked: list[tuple[int, int]] = []
        image = torch.zeros(1, 1, 1, dtype=torch.uint8).expand(3, height, width)
        output = processor._preprocess(
            [image], do_resize=True, size=llama4.SizeDict(height=SIDE, width=SIDE), resample=None, do_rescale=True,
            rescale_factor=1 / 255, do_normalize=True, image_mean=None, image_std=None, disable_grouping=None,
            return_tensors="pt", **options,
        )  # fmt: skip
        (rows, columns), picture = output["aspect_ratios"].flatten().tolist(), asked[0]
        assert len(output["pixel_values"].flatten(0, -4)) == rows * columns + (rows * columns > 1)
        yield [rows, columns, int(picture[0]), int(picture[1])]


def official_pixels(height: int, width: int) -> int:
    """CRC-32 of the normalised tiles, bfloat16 [tiles, 3, side, side], of a synthetic image."""
    import torch
    from transformers import Llama4ImageProcessor

    image = torch.from_numpy(synthetic_image(height, width)).permute(2, 0, 1)
    tiles = Llama4ImageProcessor()(image, return_tensors="pt").pixel_values
    assert tiles.dtype == torch.bfloat16
    return zlib.crc32(tiles.flatten(0, -4).contiguous().view(torch.int16).numpy().tobytes())


def main() -> None:
    pixels = [official_pixels(*size) for size in PICTURES]  # first: `official` takes the processor apart
    tilings = [list(official(settings, all_sizes(settings))) for settings in SETTINGS]
    FILE.write_text(json.dumps({"pixels": pixels, "tilings": tilings}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
