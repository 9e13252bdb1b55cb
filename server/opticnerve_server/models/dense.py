"""What towers of two paths share: attention that is dense over views of one size, and tables for views of another."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attend(qkv: torch.Tensor) -> torch.Tensor:
    """Full attention within each view: of [views, rows, 3, heads, head_dim] the [views, rows, width].

    All views of a path are of one size, so nothing has to be said of their lengths.
    """
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def resized_square(table: torch.Tensor, side: int) -> torch.Tensor:
    """A table [n, n, width] of absolute positions for another side, bicubic with antialias, in float32."""
    if table.shape[0] == side:
        return table
    square = table.float().permute(2, 0, 1)[None]
    square = F.interpolate(square, size=(side, side), mode="bicubic", antialias=True, align_corners=False)
    return square[0].permute(1, 2, 0).to(table.dtype)
