"""Attention by the flash-attn packages: the newest of FlashAttention 4, 3 and 2 that is installed."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch

from ..types import Launch

PACKAGES = (
    ("flash_attn.cute.interface", "flash-attn-4", 9, Launch.SEGMENTS),
    ("flash_attn_interface", "flash-attn-3", 9, Launch.TILES),
    ("flash_attn", "flash-attn-2", 8, Launch.TILES),
)
"""Module, name, the least major compute capability that it runs on, and its launch; the first that can be imported is
taken. FlashAttention 4.0.0b36 launches a tile for every 128 rows and one more a segment, in `cute/tile_scheduler.py`
(`SingleTileVarlenScheduler`); 3 was not looked into."""


class Package(NamedTuple):
    """What is installed."""

    attend: Any  # its flash_attn_varlen_func
    name: str
    launch: Launch


def installed(capability: int) -> Package | None:
    """The first package that is installed and runs on this capability."""
    for module, name, least, launch in PACKAGES:
        if capability >= least:
            try:
                return Package(importlib.import_module(module).flash_attn_varlen_func, name, launch)
            except (ImportError, AttributeError):
                continue
    return None


class FlashAttn:
    """One launch for all segments. CUDA, float16 and bfloat16, head sizes that are multiples of 8."""

    name = "flash_attn"

    def __init__(self, package: Package) -> None:
        self._function, self.launch = package.attend, package.launch

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
