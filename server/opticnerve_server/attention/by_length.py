"""Two backends as one: long segments and small windows have different winners."""

from __future__ import annotations

import torch

from .base import AttentionBackend

WINDOW_ROWS = 128
"""Segments of up to so many rows are windows. Of one H200, bfloat16, head size 72, microseconds: 288 windows of 64 rows
take 123 in torch_varlen, 159 in flashinfer and 355 in flash-attn-4; one segment of 576 takes 22, 19 and 15, eleven of
1764 take 726, 513 and 416."""


class ByLength:
    """Chooses by the bound of a segment's length, which is fixed when a graph is captured: never by the batch."""

    def __init__(self, windows: AttentionBackend, long: AttentionBackend) -> None:
        self._windows, self._long = windows, long
        self.name, self.launch = long.name, long.launch

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
        """See `AttentionBackend.attend`."""
        backend = self._windows if max(max_q, max_k) <= WINDOW_ROWS else self._long
        return backend.attend(q, k, v, cu_q, cu_k, max_q, max_k, num_rows)
