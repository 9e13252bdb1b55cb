"""Attention by torch's scaled_dot_product_attention: the backend of the CPU, and the reference on CUDA."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from .. import kernels
from ..types import Launch


class Sdpa:
    """On a CPU one call a segment; elsewhere one call under a mask of num_rows x rows bytes, a reference only."""

    name = "sdpa"
    launch = Launch.ROWS

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
        if q.device.type == "cpu":
            return _by_segment(q, k, v, cu_q, cu_k)
        return _by_mask(q, k, v, cu_q, cu_k)


def _by_segment(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor
) -> torch.Tensor:
    out = q.new_zeros(q.shape)
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    for i in range(len(ends_q) - 1):
        rows_q, rows_k = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        if rows_q.start == rows_q.stop or rows_k.start == rows_k.stop:
            continue
        out[rows_q] = _attend_dense(q[rows_q], k[rows_k], v[rows_k])
    return out


def _by_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor) -> torch.Tensor:
    kernels.clear_tail_(cu_k, k)  # minus infinity is added to masked scores: one of NaN would stay NaN
    mask = _segment_of(q.shape[0], cu_q)[:, None] == _segment_of(k.shape[0], cu_k)[None, :]
    return _attend_dense(q, k, v, mask)


def _segment_of(rows: int, cu: torch.Tensor) -> torch.Tensor:
    """Segment of each row, int64 [rows]; rows behind the last one all get the number of segments."""
    return torch.searchsorted(cu[1:], torch.arange(rows, dtype=cu.dtype, device=cu.device), right=True)


def _attend_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    q_1hrd, k_1hrd, v_1hrd = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return scaled_dot_product_attention(q_1hrd, k_1hrd, v_1hrd, attn_mask=mask).squeeze(0).transpose(0, 1)
