"""The kernels in torch: the reference, and what runs on a CPU. Contracts are in `__init__.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def add_layer_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    scale: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    if delta is not None:
        x = x + (delta if scale is None else scale * delta)
    return x, F.layer_norm(x, weight.shape, weight, bias, eps)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, scale: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if delta is not None:
        x = x + (delta if scale is None else scale * delta)
    x32 = x.float()
    normal = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return x, weight * normal.to(x.dtype)


def rotate_(qkv: torch.Tensor, turns: torch.Tensor) -> None:
    qk = qkv[:, :2].unflatten(0, (-1, turns.shape[0]))
    pairs = torch.view_as_complex(qk.float().unflatten(-1, (-1, 2)))
    qk.copy_(torch.view_as_real(pairs * turns).flatten(-2))


def gated(gate_up: torch.Tensor, inner: int) -> torch.Tensor:
    return F.silu(gate_up[:, :inner]) * gate_up[:, inner:]


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def gelu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
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
    numbers = torch.arange(patch, dtype=torch.int32, device=pixels.device)
    lines = origin[:, :, None] + stride[:, None, None] * numbers
    levels = pixels.view(-1, patch * 3).index_select(0, lines.flatten()).view(-1, 3).float()
    return ((levels - mean) / std).to(dtype).view(len(origin), -1)


def clear_tail_(cu: torch.Tensor, rows: torch.Tensor, more: torch.Tensor | None = None) -> None:
    tail = torch.arange(rows.shape[0], dtype=torch.int32, device=cu.device) >= cu[-1]
    for tensor in (rows,) if more is None else (rows, more):
        tensor.masked_fill_(tail[:, None, None], 0)


def add_taps(x: torch.Tensor, table: torch.Tensor, taps: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return x + F.embedding_bag(taps, table, mode="sum", per_sample_weights=weights).to(x.dtype)


def gather(source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    torch.index_select(source, 0, index, out=out)
    # Both ends in one pass; unlike a maximum of magnitudes it needs no second copy of the rows.
    low, high = torch.aminmax(out, dim=1)
    return torch.maximum(-low, high).float()
