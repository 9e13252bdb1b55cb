"""Attention backends, one file each, and the choice between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .base import AttentionBackend

NAMES = ("sdpa", "torch_varlen", "flash_attn", "flashinfer")
"""Every backend that can be asked for by name."""


class AttentionError(ValueError):
    """The backend asked for cannot run here. The text says why and what can."""


def resolve(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[AttentionBackend, str]:
    """The backend called `name`, or for "auto" the best one that can run, and the reason for the choice.

    "auto" is fixed by what the machine is and has: flash_attn for long segments with torch_varlen for windows where
    FlashAttention 3 or 4 is installed, else torch_varlen, else sdpa. `by_length.py` has the measurements. flashinfer
    is never the fastest of those installed, so it is only taken by name.

    Raises AttentionError for an unknown name, and for a backend that cannot run on this device, dtype or head size.
    """
    if name not in ("auto", *NAMES):
        raise AttentionError(f"unknown attention backend {name!r}: use auto or one of {', '.join(NAMES)}")
    if name == "sdpa":
        from .sdpa import Sdpa

        return Sdpa(), "asked for by name"
    obstacle = _obstacle(device, dtype, head_dim)
    if name == "auto":
        return _best(device, dtype, obstacle)
    if not obstacle:
        backend, obstacle = _named(name, device, head_dim)
        if backend is not None:
            return backend, "asked for by name"
    raise AttentionError(f"attention backend {name} cannot run here: {obstacle}; use auto or sdpa")


def _best(device: torch.device, dtype: torch.dtype, obstacle: str) -> tuple[AttentionBackend, str]:
    if obstacle:
        from .sdpa import Sdpa

        return Sdpa(), f"kernels for packed segments cannot run: {obstacle}"
    from .flash_attn import FlashAttn, installed
    from .torch_varlen import TorchVarlen

    what = f"{dtype} on CUDA".replace("torch.", "")
    found = installed(_capability(device))
    if found is None or found.name == "flash-attn-2":  # torch_varlen is the same kernel
        return TorchVarlen(), f"{what}, and neither flash-attn-4 nor flash-attn-3 is installed"
    from .by_length import WINDOW_ROWS, ByLength

    reason = f"{what}: {found.name} for long segments, torch_varlen for those of up to {WINDOW_ROWS} rows"
    return ByLength(TorchVarlen(), FlashAttn(found)), reason


def _named(name: str, device: torch.device, head_dim: int) -> tuple[AttentionBackend | None, str]:
    """The backend, or why there is none, on a device, dtype and head size that kernels for packed segments take."""
    if name == "torch_varlen":
        from .torch_varlen import TorchVarlen

        return TorchVarlen(), ""
    if name == "flash_attn":
        from .flash_attn import FlashAttn, installed

        found = installed(_capability(device))
        if found is None:
            return None, "none of flash-attn-4, flash-attn-3 and flash-attn is installed (extra: flash-attn)"
        return FlashAttn(found), ""
    if head_dim > 128:
        return None, f"it takes head sizes up to 128, the tower's is {head_dim}"
    from .flashinfer import FlashInfer

    try:
        return FlashInfer(), ""
    except ImportError as error:
        return None, f"{error} (extra: flashinfer)"


def _capability(device: torch.device) -> int:
    import torch

    return torch.cuda.get_device_capability(device)[0]


def _obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Why no kernel for packed segments can run; empty when they can."""
    import torch

    if device.type != "cuda":
        return f"they need a CUDA device, this is {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"they take float16 or bfloat16, the tower is {dtype}".replace("torch.", "")
    if head_dim % 8 or head_dim > 256:
        return f"they take head sizes that are multiples of 8 up to 256, the tower's is {head_dim}"
    return ""
