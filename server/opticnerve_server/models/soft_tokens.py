"""The size of images and frames for Gemma 4: the largest that keeps the aspect within a number of soft tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""The numbers that the official processors take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftTokenResize:
    """`get_aspect_ratio_preserving_size` of transformers' Gemma4ImageProcessor and Gemma4VideoProcessor.

    A soft token is `side` x `side` pixels, the pooled patches; small images are enlarged. Where one side would round
    down to nothing it becomes `side`, and the other what the aspect rounds down to.
    """

    side: int
    max_soft_tokens: int

    def __call__(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after the resize; every size has one."""
        scale = math.sqrt(self.max_soft_tokens * self.side**2 / (height * width))
        rows, columns = math.floor(scale * height / self.side), math.floor(scale * width / self.side)
        if not rows:
            rows, columns = 1, min(width // height, self.max_soft_tokens)
        elif not columns:
            rows, columns = min(height // width, self.max_soft_tokens), 1
        return rows * self.side, columns * self.side

    @property
    def max_tokens(self) -> int:
        """See grid.ResizeRule."""
        return self.max_soft_tokens
