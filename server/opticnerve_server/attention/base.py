"""The attention seam: what a backend is, and the one thing every backend must do to the rows of no segment."""

from __future__ import annotations

import functools
from typing import Protocol

import torch


class AttentionBackend(Protocol):
    """Packed attention over many sequences that lie one behind another, one file a backend.

    Stateless and capturable: on CUDA nothing is read back to the host.
    """

    name: str
    launches_by_segments: bool
    """Whether a launch costs segments x longest, whatever they hold, so that tight capacities pay."""

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
        """Softmax(q k^T / sqrt(head_dim)) v within each segment, non-causal.

        `q` is [num_rows, heads, head_dim], `k` and `v` are [rows, heads, head_dim], of one dtype; views are fine.
        `cu_q` and `cu_k` are int32 [segments + 1] on their device: monotone from 0, the last offset repeated for absent
        segments. Segment i of q attends to segment i of k. `max_q` and `max_k` bound the rows of a segment.

        Returns [num_rows, heads, head_dim]. Rows behind the last segment are zero there, and reach no other row,
        whatever q, k and v hold in them, NaN included; in k and v they may be overwritten.
        """
        ...


def zero_tail(rows: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
    """`rows` [n, heads, head_dim] with zeros behind the last segment of `cu`; selected, as 0 x NaN would be NaN."""
    tail = _row_numbers(rows.shape[0], cu.device) >= cu[-1]
    return rows.masked_fill(tail[:, None, None], 0)


@functools.lru_cache(maxsize=256)
def _row_numbers(rows: int, device: torch.device) -> torch.Tensor:
    """0 to rows - 1, int32: made once, not by a kernel of every layer."""
    return torch.arange(rows, dtype=torch.int32, device=device)
