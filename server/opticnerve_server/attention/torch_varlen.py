"""Attention by torch's own varlen kernel (FlashAttention-2): the CUDA default, in torch from 2.10 on."""

from __future__ import annotations

import inspect
from functools import partial

import torch
from torch.nn.attention.varlen import varlen_attn

from ..types import Launch

# Split-KV chooses its splits by the longest segment of the batch, and with them the order of the sums: without it a
# segment's result does not depend on its neighbours. Releases without the argument never split here.
_SPLITS = "num_splits" in inspect.signature(varlen_attn).parameters
_attend = partial(varlen_attn, num_splits=1) if _SPLITS else varlen_attn


class TorchVarlen:
    """One launch for all segments, over a grid of segments x longest. CUDA, float16 and bfloat16."""

    name = "torch_varlen"
    launch = Launch.TILES

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
        """See `AttentionBackend.attend`. The kernel leaves rows of no segment unwritten and never reads them."""
        out = _attend(q, k, v, cu_q, cu_k, max_q, max_k)
        assert isinstance(out, torch.Tensor)  # a pair only where more than the output is asked for
        return out
