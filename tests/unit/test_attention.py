"""Attention backends against a softmax written out in float64. The CUDA ones are compared in tests/gpu."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from opticnerve_server import attention
from opticnerve_server.attention import sdpa
from opticnerve_server.attention.by_length import WINDOW_ROWS
from opticnerve_server.attention.flash_attn import PACKAGES
from opticnerve_server.attention.torch_varlen import TorchVarlen
from opticnerve_server.types import Launch

HEADS, SIZE = 3, 8
CASES = {
    "one": ([7], [7], 0),
    "several": ([4, 1, 9, 16], [4, 1, 9, 16], 0),
    "padded": ([4, 9], [4, 9], 5),
    "empty between and behind": ([3, 0, 6, 0, 0], [3, 0, 6, 0, 0], 4),
    "nothing at all": ([0, 0], [0, 0], 6),
    "queries of their own": ([2, 2, 5], [9, 1, 4], 3),
}


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def random_rows(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, HEADS, SIZE, generator=torch.Generator().manual_seed(seed))


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths_q: list[int], lengths_k: list[int]
) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64)
    begin_q = begin_k = 0
    for n_q, n_k in zip(lengths_q, lengths_k, strict=True):
        rows_q, rows_k = slice(begin_q, begin_q + n_q), slice(begin_k, begin_k + n_k)
        for head in range(HEADS):
            scores = q[rows_q, head].double() @ k[rows_k, head].double().T / math.sqrt(SIZE)
            out[rows_q, head] = scores.softmax(-1) @ v[rows_k, head].double()
        begin_q, begin_k = rows_q.stop, rows_k.stop
    return out


@pytest.mark.parametrize("form", [sdpa._by_segment, sdpa._by_mask], ids=["by_segment", "by_mask"])
@pytest.mark.parametrize(("lengths_q", "lengths_k", "tail"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("poison", [0.0, math.nan, math.inf])
def test_sdpa_equals_a_written_out_softmax(
    form: object, lengths_q: list[int], lengths_k: list[int], tail: int, poison: float
) -> None:
    assert callable(form)
    q, k, v = (random_rows(sum(n) + tail, seed) for seed, n in enumerate((lengths_q, lengths_k, lengths_k)))
    expected = written_out(q, k, v, lengths_q, lengths_k)
    used = sum(lengths_q)
    q[used:] = k[sum(lengths_k) :] = poison
    v[sum(lengths_k) :] = 3e38  # finite, which is all that is promised
    out = form(q, k, v, offsets(lengths_q), offsets(lengths_k))
    assert out.shape == q.shape
    torch.testing.assert_close(out[:used].double(), expected[:used], rtol=1e-5, atol=1e-6)


def test_sdpa_takes_strided_views() -> None:
    packed = random_rows(12, 0).repeat(1, 3, 1).view(12, 3, HEADS, SIZE)
    q, k, v = packed.unbind(1)
    cu = offsets([5, 7])
    backend, _ = attention.resolve("sdpa", torch.device("cpu"), torch.float32, SIZE)
    out = backend.attend(q, k, v, cu, cu, 7, 7, 12)
    torch.testing.assert_close(out.double(), written_out(q, k, v, [5, 7], [5, 7]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_on_a_cpu_is_sdpa_and_says_why(dtype: torch.dtype) -> None:
    backend, reason = attention.resolve("auto", torch.device("cpu"), dtype, 64)
    assert backend.name == "sdpa"
    assert backend.launch is Launch.ROWS
    assert "CUDA" in reason


@pytest.mark.parametrize(
    ("dtype", "head_dim", "name"),
    [
        (torch.bfloat16, 72, "torch_varlen"),
        (torch.float16, 80, "torch_varlen"),
        (torch.float32, 64, "sdpa"),
        (torch.bfloat16, 12, "sdpa"),
        (torch.bfloat16, 264, "sdpa"),
    ],
)
def test_auto_on_cuda_is_varlen_where_it_can_run(
    dtype: torch.dtype, head_dim: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_capability", lambda device: 9)
    backend, reason = attention.resolve("auto", torch.device("cuda"), dtype, head_dim)
    assert backend.name == name
    assert backend.launch is (Launch.TILES if name == "torch_varlen" else Launch.ROWS)
    assert reason


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "why"),
    [("cpu", torch.bfloat16, 64, "CUDA"), ("cuda", torch.float32, 64, "float32"), ("cuda", torch.bfloat16, 20, "20")],
)
def test_a_backend_that_cannot_run_is_refused_by_name(device: str, dtype: torch.dtype, head_dim: int, why: str) -> None:
    with pytest.raises(attention.AttentionError, match=rf"torch_varlen cannot run here: .*{why}.* use auto or sdpa"):
        attention.resolve("torch_varlen", torch.device(device), dtype, head_dim)


@pytest.mark.parametrize(("module", "package", "launch"), [(each[0], each[1], each[3]) for each in PACKAGES])
def test_auto_takes_what_is_installed_for_long_segments_alone(
    module: str, package: str, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **bounds: Any) -> torch.Tensor:
        called.append(bounds["max_seqlen_k"])
        return torch.zeros_like(q)

    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(parts[count - 1]))
    sys.modules[module].flash_attn_varlen_func = attend  # type: ignore[attr-defined]
    monkeypatch.setattr(attention, "_capability", lambda device: 9)
    backend, reason = attention.resolve("auto", torch.device("cuda"), torch.bfloat16, 72)
    if package == "flash-attn-2":  # torch_varlen is the same kernel
        assert backend.name == "torch_varlen"
        return
    assert backend.name == "flash_attn"
    assert backend.launch is launch
    assert package in reason
    monkeypatch.setattr(TorchVarlen, "attend", lambda self, q, *rest: called.append(-1))
    q, cu = torch.zeros(200, 2, 8), torch.tensor([0, 200], dtype=torch.int32)
    for longest in (WINDOW_ROWS, WINDOW_ROWS + 1):
        backend.attend(q, q, q, cu, cu, longest, longest, 200)
    assert called == [-1, WINDOW_ROWS + 1]


@pytest.mark.parametrize("name", ["flash_attn", "flashinfer"])
def test_a_missing_package_is_an_error_only_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_capability", lambda device: 9)
    with pytest.raises(attention.AttentionError, match=rf"{name} cannot run here: .*extra: .*; use auto or sdpa"):
        attention.resolve(name, torch.device("cuda"), torch.bfloat16, 72)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(attention.AttentionError, match=r"unknown attention backend 'flash'.*sdpa, torch_varlen"):
        attention.resolve("flash", torch.device("cpu"), torch.float32, 64)
