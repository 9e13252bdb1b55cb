"""The kernels in torch: the contracts, the reference, and what runs on a CPU.

Tensors are contiguous unless said otherwise; `x` and what is returned have one dtype, and sums and statistics are in
float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def layer_norm(
    x: torch.Tensor, shift: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """LayerNorm of x + shift, [rows, width]; `shift` float32, `weight` and `bias` are [width]. Rounded once."""
    parts = (weight.float(), bias.float())
    return F.layer_norm(_shifted(x, shift), weight.shape, *parts, eps).to(x.dtype)


def rms_norm(x: torch.Tensor, shift: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of x + shift, as `layer_norm`, rounded before the weight is applied as well."""
    x32 = _shifted(x, shift)
    normal = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * normal.to(x.dtype)


def _shifted(x: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    return x.float() if shift is None else x.float() + shift


def rotate_(qkv: torch.Tensor, turns: torch.Tensor, cu: torch.Tensor | None = None) -> None:
    """Turn queries and keys of `qkv` [rows, 3, heads, head_dim] in place, each pair of neighbours of a head.

    `turns` complex64 [n, 1, 1, head_dim / 2] are those of n rows, and of each n rows behind them. The products are in
    float32 and rounded once. With `cu`, int32 offsets of segments, the same pass zeroes the values behind the last one,
    which is what attention wants of them; without it values are not touched, and `qkv` need not have any.
    """
    qk = qkv[:, :2].unflatten(0, (-1, turns.shape[0]))
    pairs = torch.view_as_complex(qk.float().unflatten(-1, (-1, 2)))
    qk.copy_(torch.view_as_real(pairs * turns).flatten(-2))
    if cu is not None:
        clear_tail_(cu, qkv[:, 2])


def gated(gate_up: torch.Tensor, inner: int) -> torch.Tensor:
    """silu(gate) * up, [rows, inner], of the two side by side, [rows, 2 x inner]; silu is rounded before."""
    return F.silu(gate_up[:, :inner]) * gate_up[:, inner:]


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x sigmoid(1.702 x), the sigmoid approximation of GELU; rounded once in one pass, twice in torch."""
    return x * torch.sigmoid(1.702 * x)


def gelu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """GELU, by its tanh formula, of x W^T + b: [rows, outputs], with W [outputs, inputs].

    On CUDA in the epilogue of the product, where it sees sums before they are rounded.
    """
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def patches(
    pixels: torch.Tensor,
    origin: torch.Tensor,
    stride: torch.Tensor,
    patch: int,
    mean: torch.Tensor,
    std: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Normalised patches [rows, frames x patch x patch x 3] of packed uint8 images: see `layers.PatchLevels`.

    (level - mean) / std in float32, `mean` and `std` [3] in levels, rounded once to `dtype`: bit-equal to the
    torchvision-backed processors, whose pixels are then cast.
    """
    numbers = torch.arange(patch, dtype=torch.int32, device=pixels.device)
    lines = origin[:, :, None] + stride[:, None, None] * numbers
    levels = pixels.view(-1, patch * 3).index_select(0, lines.flatten()).view(-1, 3).float()
    return ((levels - mean) / std).to(dtype).view(len(origin), -1)


def clear_tail_(cu: torch.Tensor, rows: torch.Tensor) -> None:
    """Zero `rows` [n, heads, head_dim] behind the last offset of `cu` int32, in place; they may be strided."""
    tail = torch.arange(rows.shape[0], dtype=torch.int32, device=cu.device) >= cu[-1]
    rows.masked_fill_(tail[:, None, None], 0)


def add_taps(x: torch.Tensor, table: torch.Tensor, taps: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x + the sum of `weights` times the lines `taps` of a table: an interpolated position table, never laid out.

    `x` [rows, width], `table` float32 [lines, width], `taps` int32 and `weights` float32 [rows, n]; the sum is in
    float32 and rounded to the dtype of x before it is added.
    """
    return x + F.embedding_bag(taps, table, mode="sum", per_sample_weights=weights).to(x.dtype)


def gather(source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Lines `index` int32 [n] of `source` [lines, width] into `out` [n, width].

    Returns the largest magnitude of each, float32 [n]: NaN where one is in it, infinity where that is.
    """
    torch.index_select(source, 0, index, out=out)
    # Both ends in one pass; unlike a maximum of magnitudes it needs no second copy of the rows.
    low, high = torch.aminmax(out, dim=1)
    return torch.maximum(-low, high).float()
