"""Attention by FlashInfer's ragged prefill on cuDNN."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..types import Launch

WORKSPACE_BYTES = 128 << 20


class FlashInfer:
    """One launch for all segments. CUDA, float16 and bfloat16, head sizes that are multiples of 8 up to 128.

    cuDNN builds a plan for every pair of segments and longest, at the first batch that has them.
    """

    name = "flashinfer"
    launch = Launch.TILES

    def __init__(self) -> None:
        """Raises ImportError where flashinfer or cuDNN's front-end is not installed."""
        import cudnn  # noqa: F401  # flashinfer itself only notes that it is missing
        from flashinfer.prefill import cudnn_batch_prefill_with_kv_cache

        self._function: Any = cudnn_batch_prefill_with_kv_cache

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
        """See `AttentionBackend.attend`. Its plans are cached by sizes, not by strides: everything is contiguous."""
        q, k, v = (part.contiguous() for part in (q, k, v))
        out = torch.empty_like(q)
        width = q.shape[1] * q.shape[2]
        offsets_q, offsets_k = ((cu * width).view(-1, 1, 1, 1) for cu in (cu_q, cu_k))
        self._function(
            q,
            k,
            v,
            q.shape[2] ** -0.5,
            _workspace(q.device),
            max_token_per_sequence=max_q,
            max_sequence_kv=max_k,
            actual_seq_lens_q=cu_q.diff().view(-1, 1, 1, 1),
            actual_seq_lens_kv=cu_k.diff().view(-1, 1, 1, 1),
            causal=False,
            return_lse=False,
            batch_offsets_q=offsets_q,
            batch_offsets_k=offsets_k,
            batch_offsets_v=offsets_k,
            batch_offsets_o=offsets_q,
            is_cuda_graph_compatible=True,
            out=out,
        )
        return out


@functools.lru_cache(maxsize=8)
def _workspace(device: torch.device) -> torch.Tensor:
    """Scratch memory of cuDNN on a device, for one launch at a time."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
