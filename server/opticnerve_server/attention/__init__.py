"""Attention backends, one file each, and the choice between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .base import AttentionBackend

NAMES = ("sdpa", "torch_varlen")
"""Every backend that can be asked for by name."""


class AttentionError(ValueError):
    """The backend asked for cannot run here. The text says why and what can."""


def resolve(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[AttentionBackend, str]:
    """The backend called `name`, or for "auto" the best one that can run, and the reason for the choice.

    Raises AttentionError for an unknown name, and for a backend that cannot run on this device, dtype or head size.
    """
    if name not in ("auto", *NAMES):
        raise AttentionError(f"unknown attention backend {name!r}: use auto or one of {', '.join(NAMES)}")
    obstacle = _varlen_obstacle(device, dtype, head_dim)
    if name == "torch_varlen" and obstacle:
        raise AttentionError(f"attention backend torch_varlen cannot run here: {obstacle}; use auto or sdpa")
    if name == "sdpa" or obstacle:
        from .sdpa import Sdpa

        return Sdpa(), "asked for by name" if name == "sdpa" else f"torch_varlen cannot run: {obstacle}"
    from .torch_varlen import TorchVarlen

    return TorchVarlen(), "asked for by name" if name == "torch_varlen" else f"{dtype} on CUDA".replace("torch.", "")


def _varlen_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Why torch_varlen cannot run; empty when it can."""
    import torch

    if device.type != "cuda":
        return f"it needs a CUDA device, this is {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 or bfloat16, the tower is {dtype}".replace("torch.", "")
    if head_dim % 8 or head_dim > 256:
        return f"it takes head sizes that are multiples of 8 up to 256, the tower's is {head_dim}"
    return ""
