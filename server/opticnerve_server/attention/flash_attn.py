"""Attention by the flash-attn packages: the newest of FlashAttention 4, 3 and 2 that is installed."""

from __future__ import annotations

import importlib
from typing import Any

import torch

PACKAGES = (
    ("flash_attn.cute.interface", "flash-attn-4", 9),
    ("flash_attn_interface", "flash-attn-3", 9),
    ("flash_attn", "flash-attn-2", 8),
)
"""Module, name, and the least major compute capability that it runs on; the first that can be imported is taken."""


def installed(capability: int) -> tuple[Any, str] | None:
    """The function of the first package that is installed and runs on this capability, and the package's name."""
    for module, name, least in PACKAGES:
        if capability >= least:
            try:
                return importlib.import_module(module).flash_attn_varlen_func, name
            except (ImportError, AttributeError):
                continue
    return None


class FlashAttn:
    """One launch for all segments. CUDA, float16 and bfloat16, head sizes that are multiples of 8."""

    name = "flash_attn"
    launches_by_segments = True

    def __init__(self, function: Any) -> None:
        """`function` is what `installed` found."""
        self._function = function

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_q: torch.Tensor,
        cu_k: torch.Tensor,
        max_q: int,
        max_k: int,
        num_rows: int,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`. The last tile of keys reaches behind the last segment; masked scores are
        replaced, whatever they are.
        """
        out = self._function(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k, causal=False
        )
        rows: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return rows
