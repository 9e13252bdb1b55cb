"""What a forward spends on matrix products and on attention: recorded while it runs, to be run again by itself.

Nothing here knows a model: products are seen where torch dispatches them, attention at the seam of the backends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from ..attention import NAMES, AttentionError, resolve
from ..attention.base import AttentionBackend
from ..models.base import Tower
from ..types import Capacity

DENSE = "cudnn_dense"
"""torch's scaled_dot_product_attention by cuDNN, over segments of one length: no backend, as segments may differ."""


@dataclass(frozen=True, slots=True)
class Product:
    """x W + b with `rows` rows of x, whatever was done to its output: an epilogue is no part of it."""

    rows: int
    weight: torch.Tensor  # [inputs, outputs], the tower's own
    bias: torch.Tensor | None

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.weight.numel()

    def run(self, x: torch.Tensor) -> None:
        """The product alone, of x [rows, inputs]."""
        if self.bias is None:
            torch.mm(x, self.weight)
        else:
            torch.addmm(self.bias, x, self.weight)


@dataclass(frozen=True, slots=True)
class Attend:
    """One call of attention over real segments: the rows of each, without those that a capacity leaves empty."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def uniform(self) -> bool:
        return len(set(self.lengths_q)) == len(set(self.lengths_k)) == 1


class Heard:
    """A backend that tells a recorder of its calls while there is one; build a tower with it to record its forwards."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.name, self.launch = backend.name, backend.launch
        self.recorder: Recorder | None = None

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
        """See `AttentionBackend.attend`. What a recorder hears of does not run: no shape depends on it."""
        recorder = self.recorder
        if recorder is None:
            return self._backend.attend(q, k, v, cu_q, cu_k, max_q, max_k, num_rows)
        recorder.attends.append(Attend(_lengths(cu_q), _lengths(cu_k), q.shape[1], q.shape[2], q.dtype))
        return torch.zeros_like(q)


class Recorder(TorchDispatchMode):
    """Keeps the products and the attention of what runs under it, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[Product] = []
        self.attends: list[Attend] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        order = _ARGUMENTS.get(func)
        if order:
            rows, weight, bias = order
            x, stored = args[rows], args[weight]
            matrix = stored.t() if func is torch.ops.aten.linear.default else stored
            added = args[bias] if bias is not None and bias < len(args) else None
            self.products.append(Product(x.numel() // x.shape[-1], matrix, added))
        return func(*args, **(kwargs or {}))


_ARGUMENTS: dict[Any, tuple[int, int, int | None]] = {
    torch.ops.aten.linear.default: (0, 1, 2),
    torch.ops.aten.mm.default: (0, 1, None),
    torch.ops.aten.addmm.default: (1, 2, 0),
    torch.ops.aten.addmm_.default: (1, 2, None),
    torch.ops.aten._addmm_activation.default: (1, 2, 0),
}
"""Where each product has its rows, its weight and its bias."""


def record(
    tower: Tower, attention: Heard, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity
) -> tuple[list[Product], list[Attend]]:
    """The products and the attention of one forward; the buffers hold a batch. `attention` is the tower's backend."""
    with Recorder() as recorder:
        attention.recorder = recorder
        try:
            tower.forward(path, buffers, capacity)
        finally:
            attention.recorder = None
    return recorder.products, recorder.attends


def products_run(products: Sequence[Product], device: torch.device) -> Callable[[], None]:
    """All products again, in order, with the tower's weights, over random rows."""
    shapes = {(product.rows, product.weight.shape[0], product.weight.dtype) for product in products}
    rows = {shape: torch.randn(*shape[:2], device=device, dtype=shape[2]) for shape in shapes}

    def run() -> None:
        for product in products:
            product.run(rows[product.rows, product.weight.shape[0], product.weight.dtype])

    return run


def attention_runs(
    attend: Attend, times: int, device: torch.device
) -> tuple[dict[str, Callable[[], None]], dict[str, str]]:
    """The same attention, so many times, by each backend that can run here, and why the others cannot.

    Over contiguous random rows of exactly the segments; sdpa's mask of all rows by all rows is no candidate on CUDA.
    """
    backends: dict[str, AttentionBackend] = {}
    missing: dict[str, str] = {}
    for name in NAMES:
        try:
            backends[name] = resolve(name, device, attend.dtype, attend.head_dim)[0]
        except AttentionError as error:
            missing[name] = str(error)
    if device.type == "cuda":
        del backends["sdpa"]
    q, k, v = (
        torch.randn(sum(lengths), attend.heads, attend.head_dim, device=device, dtype=attend.dtype)
        for lengths in (attend.lengths_q, attend.lengths_k, attend.lengths_k)
    )
    cu_q, cu_k = (_offsets(lengths, device) for lengths in (attend.lengths_q, attend.lengths_k))
    longest = max(attend.lengths_q), max(attend.lengths_k)

    def packed(backend: AttentionBackend) -> None:
        for _ in range(times):
            backend.attend(q, k, v, cu_q, cu_k, *longest, len(q))

    def dense() -> None:
        dense_q, dense_k, dense_v = (
            part.view(len(attend.lengths_q), -1, *part.shape[1:]).transpose(1, 2) for part in (q, k, v)
        )
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            for _ in range(times):
                scaled_dot_product_attention(dense_q, dense_k, dense_v)

    runs: dict[str, Callable[[], None]] = {name: partial(packed, backend) for name, backend in backends.items()}
    if device.type == "cuda" and attend.uniform:
        runs[DENSE] = dense
    return runs, missing


def _lengths(cu: torch.Tensor) -> tuple[int, ...]:
    return tuple(length for length in cu.diff().tolist() if length)


def _offsets(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return ends.to(torch.int32).to(device)
