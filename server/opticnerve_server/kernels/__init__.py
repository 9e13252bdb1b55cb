"""What a tower does between its matrix products and its attention, each in one pass over memory.

Every function has two implementations of one contract: `plain`, in torch, which runs everywhere and is the reference,
and `fused`, in Triton. One switch of the process says which of them CUDA tensors get; others always get the plain one.
Tensors are contiguous unless said otherwise;
`x`, `delta` and what is returned have one dtype, and sums and statistics are in float32.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import torch

from . import plain

log = logging.getLogger(__name__)

NAMES = ("auto", "triton", "torch")
"""Values of the switch."""

_on_cuda: ModuleType = plain


class KernelsError(ValueError):
    """The kernels asked for cannot run here. The text says why and what can."""


def choose(name: str, device: torch.device) -> str:
    """Set the switch: "triton", "torch", or "auto" for Triton where it runs. Returns the reason for the choice.

    Call it before a tower is built: what is captured afterwards keeps the kernels of its time. Raises KernelsError for
    an unknown name, and where "triton" was asked for and cannot run.
    """
    global _on_cuda
    if name not in NAMES:
        raise KernelsError(f"unknown kernels {name!r}: use {', '.join(NAMES)}")
    obstacle = "asked for by name" if name == "torch" else _obstacle(device)
    if name == "triton" and obstacle:
        raise KernelsError(f"kernels = triton cannot run here: {obstacle}; use auto or torch")
    if not obstacle:
        from . import fused

        _on_cuda = fused
        return "asked for by name" if name == "triton" else "Triton compiles here"
    if device.type == "cuda":
        _on_cuda = plain
    if name == "auto" and device.type == "cuda":
        log.warning("fused kernels cannot run, the tower is slower", extra={"reason": obstacle})
    return obstacle


def chosen(device: torch.device) -> str:
    """What tensors of this device get: "triton" or "torch"."""
    return "torch" if device.type != "cuda" or _on_cuda is plain else "triton"


def _for(x: torch.Tensor) -> Any:
    return _on_cuda if x.is_cuda else plain


def _obstacle(device: torch.device) -> str:
    """Why Triton cannot run; empty when it can. It needs its package, a C compiler and a directory to write to."""
    if device.type != "cuda":
        return f"Triton needs a CUDA device, this is {device.type}"
    try:
        from . import fused

        fused.gated(torch.zeros(1, 32, device=device), 16)
        torch.cuda.synchronize(device)
    except Exception as error:  # whatever keeps it from compiling, the plain kernels run
        return f"Triton does not compile: {type(error).__name__}: {error}"
    return ""


def add_layer_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    scale: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum s = x + scale * delta and its LayerNorm, both [rows, width]; s is x itself without a `delta`.

    Each step is rounded to the dtype of x before the next; `scale`, `weight` and `bias` are [width].
    """
    return _for(x).add_layer_norm(x, delta, scale, weight, bias, eps)  # type: ignore[no-any-return]


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, scale: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `add_layer_norm`, with an RMSNorm, which is rounded before the weight is applied."""
    return _for(x).add_rms_norm(x, delta, scale, weight, eps)  # type: ignore[no-any-return]


def rotate_(qkv: torch.Tensor, turns: torch.Tensor) -> None:
    """Turn queries and keys of `qkv` [rows, 3, heads, head_dim] in place, each pair of neighbours of a head.

    `turns` complex64 [n, 1, 1, head_dim / 2] are those of n rows, and of each n rows behind them. The products are in
    float32 and rounded once.
    """
    _for(qkv).rotate_(qkv, turns)


def gated(gate_up: torch.Tensor, inner: int) -> torch.Tensor:
    """silu(gate) * up, [rows, inner], of the two side by side, [rows, 2 x inner]; silu is rounded before."""
    return _for(gate_up).gated(gate_up, inner)  # type: ignore[no-any-return]


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x sigmoid(1.702 x), the sigmoid approximation of GELU; rounded once in one pass, twice in torch."""
    return _for(x).quick_gelu(x)  # type: ignore[no-any-return]


def gelu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """GELU, by its tanh formula, of x W^T + b: [rows, outputs], with W [outputs, inputs].

    On CUDA in the epilogue of the product, where it sees sums before they are rounded.
    """
    return _for(x).gelu_linear(x, weight, bias)  # type: ignore[no-any-return]


def patches(
    pixels: torch.Tensor,
    origin: torch.Tensor,
    stride: torch.Tensor,
    patch: int,
    mean: torch.Tensor,
    std: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Normalised patches [rows, frames x patch x patch x 3] of packed uint8 images: see `layers.PatchGather`.

    (level - mean) / std in float32, `mean` and `std` [3] in levels, rounded once to `dtype`: bit-equal to the
    torchvision-backed processors, whose pixels are then cast.
    """
    return _for(pixels).patches(pixels, origin, stride, patch, mean, std, dtype)  # type: ignore[no-any-return]


def clear_tail_(cu: torch.Tensor, rows: torch.Tensor, more: torch.Tensor | None = None) -> None:
    """Zero `rows`, and `more`, both [n, heads, head_dim], behind the last offset of `cu` int32, in place.

    Both may be strided, heads and numbers of a head being where they are in each row.
    """
    _for(rows).clear_tail_(cu, rows, more)


def add_taps(x: torch.Tensor, table: torch.Tensor, taps: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x + the sum of `weights` times the lines `taps` of a table: an interpolated position table, never laid out.

    `x` [rows, width], `table` float32 [lines, width], `taps` int32 and `weights` float32 [rows, n]; the sum is in
    float32 and rounded to the dtype of x before it is added.
    """
    return _for(x).add_taps(x, table, taps, weights)  # type: ignore[no-any-return]


def gather(source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Lines `index` int32 [n] of `source` [lines, width] into `out` [n, width].

    Returns the largest magnitude of each, float32 [n]: NaN where one is in it, infinity where that is.
    """
    return _for(source).gather(source, index, out)  # type: ignore[no-any-return]
