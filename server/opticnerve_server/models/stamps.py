"""The time of each frame, written onto it: what the video processor of ERNIE-4.5-VL does before its resize.

Drawn by Pillow with the checkpoint's own font, as there. A checkpoint without a font file cannot stamp, and takes no
videos; a preset, which has random weights, uses the font within Pillow.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from .base import PlanError

SIZE = 0.1
"""Height of the letters by the shorter side of a frame, and width of their outline by that height."""


class TimeStamps:
    """Draws times in the upper left corner: black, outlined in white. Thread-safe."""

    def __init__(self, font: bytes | None) -> None:
        """`font` is a TrueType or OpenType file; None takes Pillow's own. Raises OSError for another kind of file."""
        self._font = _pillow_font() if font is None else font
        self._load(10)

    def check(self, height: int, width: int) -> None:
        """Raises PlanError for frames too small for letters."""
        if int(min(height, width) * SIZE) < 1:
            raise PlanError(
                f"the frames are {height} x {width} pixels (height x width): this model writes the time onto them, "
                f"which takes {1 / SIZE:.0f} pixels a side; send larger ones"
            )

    def draw(
        self, frames: Iterable[npt.NDArray[np.uint8]], seconds: Iterable[float]
    ) -> Iterator[npt.NDArray[np.uint8]]:
        """Copies of the frames [height, width, 3] with their times on them."""
        font: ImageFont.FreeTypeFont | None = None  # of this call alone: its state is not for several threads
        outline = 0
        for frame, second in zip(frames, seconds, strict=False):
            image = Image.fromarray(frame)
            if font is None:
                height = int(min(image.size) * SIZE)
                font, outline = self._load(height), int(height * SIZE)
            ImageDraw.Draw(image).text(
                (0, 0), stamp(second), font=font, fill=(0, 0, 0), stroke_width=outline, stroke_fill=(255, 255, 255)
            )
            yield np.asarray(image)

    def _load(self, height: int) -> ImageFont.FreeTypeFont:
        return ImageFont.truetype(io.BytesIO(self._font), height)


def _pillow_font() -> bytes:
    font = ImageFont.load_default(10)
    assert isinstance(font, ImageFont.FreeTypeFont)  # a Pillow without FreeType has a bitmap font instead
    return font.font_bytes


def stamp(seconds: float) -> str:
    """The text of a time: hours, minutes and seconds with two decimals, which may round up to 60."""
    return f"time: {int(seconds // 3600):02d}:{int(seconds % 3600 // 60):02d}:{seconds % 3600 % 60:05.2f}"
