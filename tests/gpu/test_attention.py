"""Attention backends on CUDA against a softmax in float64: NaN behind the segments, empty segments, captured."""

from __future__ import annotations

import math

import pytest
import torch

from opticnerve_server import attention
from opticnerve_server.attention.base import AttentionBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HEADS = 16
LENGTHS = [[576], [64, 4, 16, 400, 1], [64] * 37, [3, 0, 0, 260], [0, 0]]
CHOICES = [("sdpa", torch.float32, 72), ("sdpa", torch.bfloat16, 72)]
CHOICES += [("torch_varlen", torch.bfloat16, size) for size in (64, 72, 80, 128)]
CHOICES += [("torch_varlen", torch.float16, 72)]
CHOICES += [(name, torch.bfloat16, size) for name in ("flash_attn", "flashinfer") for size in (64, 72, 80, 128)]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def resolved(name: str, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    try:
        return attention.resolve(name, torch.device("cuda"), dtype, head_dim)[0]
    except attention.AttentionError as error:
        pytest.skip(str(error))


def packed(lengths: list[int], spare: int, dtype: torch.dtype, head_dim: int, fill: float) -> torch.Tensor:
    """q, k, v interleaved [rows, 3, heads, head_dim]; behind the segments `fill` in q and k, in v what is finite."""
    generator = torch.Generator("cuda").manual_seed(len(lengths))
    qkv = torch.randn(sum(lengths) + spare, 3, HEADS, head_dim, device="cuda", generator=generator).to(dtype)
    qkv[sum(lengths) :, :2], qkv[sum(lengths) :, 2] = fill, 3e4
    return qkv


def offsets(lengths: list[int], spare: int) -> torch.Tensor:
    ends = torch.tensor([0, *lengths, *[0] * spare]).cumsum(0)
    return ends.to(torch.int32).cuda()


def written_out(qkv: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    q, k, v = qkv.double().transpose(0, 2).unbind(1)
    out = torch.zeros_like(q)
    begin = 0
    for length in lengths:
        rows = slice(begin, begin + length)
        scores = q[:, rows] @ k[:, rows].transpose(1, 2) / math.sqrt(q.shape[-1])
        out[:, rows] = scores.softmax(-1) @ v[:, rows]
        begin += length
    return out.transpose(0, 1)


def run(backend: AttentionBackend, qkv: torch.Tensor, cu: torch.Tensor, longest: int) -> torch.Tensor:
    q, k, v = qkv.unbind(1)
    return backend.attend(q, k, v, cu, cu, longest, longest, qkv.shape[0])


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("name", "dtype", "head_dim"), CHOICES)
@pytest.mark.parametrize("fill", [0.0, math.nan, math.inf])
def test_equals_a_written_out_softmax(
    name: str, dtype: torch.dtype, head_dim: int, lengths: list[int], fill: float
) -> None:
    backend = resolved(name, dtype, head_dim)
    qkv, cu = packed(lengths, 130, dtype, head_dim, fill), offsets(lengths, 9)
    expected = written_out(qkv, lengths)
    out = run(backend, qkv, cu, 1024)
    assert out.shape == expected.shape
    difference = (out.double() - expected)[: sum(lengths)].abs()
    assert bool((difference <= TOLERANCES[dtype] * max(float(expected.abs().max()), 1.0)).all())


@pytest.mark.parametrize(("name", "dtype", "head_dim"), CHOICES)
def test_replays_follow_their_buffers(name: str, dtype: torch.dtype, head_dim: int) -> None:
    backend = resolved(name, dtype, head_dim)
    rows, segments = 640, 40
    static, cu = packed([rows], 0, dtype, head_dim, 0.0), offsets([rows], segments - 1)
    run(backend, static, cu, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(backend, static, cu, rows)
    for lengths in ([rows], [64, 4, 16, 400, 1], [16] * 40, [0, 7]):
        static.copy_(packed(lengths, rows - sum(lengths), dtype, head_dim, math.nan))
        cu.copy_(offsets(lengths, segments - len(lengths)))
        graph.replay()
        used = sum(lengths)
        assert torch.equal(out[:used], run(backend, static, cu, rows)[:used])


@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize("name", ["torch_varlen", "flash_attn", "flashinfer"])
def test_a_segment_does_not_depend_on_its_neighbours(name: str, head_dim: int) -> None:
    backend = resolved(name, torch.bfloat16, head_dim)
    lengths = [400, 64, 2048]
    qkv = packed(lengths, 64, torch.bfloat16, head_dim, math.nan)
    together = run(backend, qkv, offsets(lengths, 3), 4096)
    begin = 0
    for length in lengths:
        alone = run(backend, qkv[begin : begin + length].contiguous(), offsets([length], 0), length)
        assert torch.equal(alone, together[begin : begin + length])
        begin += length
