"""The attention seam: what a backend is, and what is owed to the rows of no segment."""

from __future__ import annotations

from typing import Protocol

import torch

from ..types import Launch


class AttentionBackend(Protocol):
    """Packed attention over many sequences that lie one behind another, one file a backend.

    Stateless and capturable: on CUDA nothing is read back to the host.
    """

    name: str
    launch: Launch
    """The classes of a budget follow from it (`graphs.plan_capacities`)."""

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

        Rows behind the last segment must be finite in v: the last tile of keys may reach there, and though what is
        masked has a probability of 0, 0 x NaN is NaN. In q and k they may hold anything; in k they may be overwritten.

        Returns [num_rows, heads, head_dim]. Rows behind the last segment hold anything there, NaN included, and have
        reached no other row. Nor do they afterwards: all else in a tower goes row by row, token by token or tile by
        tile.
        """
        ...
