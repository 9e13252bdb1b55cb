"""The kernels between products and attention against float64, and the fused ones against the plain ones.

The plain ones are tried on a CPU too.
"""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from opticnerve_server.kernels import plain

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}


def implementation(name: str) -> tuple[ModuleType, str]:
    """The kernels called `name`, and the device that they run on."""
    if name == "plain on a CPU":
        return plain, "cpu"
    from opticnerve_server.kernels import fused

    return {"plain": plain, "fused": fused}[name], "cuda"


EACH = pytest.mark.parametrize(
    "name",
    ["plain on a CPU", *(pytest.param(name, marks=[pytest.mark.gpu, CUDA]) for name in ("plain", "fused"))],
)
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def randn(*shape: int, seed: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_near(mine: torch.Tensor, expected: torch.Tensor) -> None:
    assert mine.shape == expected.shape
    error = (mine.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error <= TOLERANCES[mine.dtype], f"{error:.1e}"


@EACH
@DTYPES
@pytest.mark.parametrize("width", [8, 96, 1152, 5120])
@pytest.mark.parametrize("shifted", [False, True], ids=["x", "x and shift"])
@pytest.mark.parametrize("rms", [False, True], ids=["layer norm", "rms norm"])
def test_norms(name: str, dtype: torch.dtype, width: int, shifted: bool, rms: bool) -> None:
    kernels, device = implementation(name)
    x = randn(37, width, seed=0, device=device, dtype=dtype) * 3 + 1
    weight, bias = (randn(width, seed=seed, device=device, dtype=dtype) for seed in (1, 2))
    shift = randn(width, seed=3, device=device, dtype=torch.float32) * 5 if shifted else None
    before, exact = x.clone(), x.double() if shift is None else x.double() + shift.double()
    if rms:
        normed = kernels.rms_norm(x, shift, weight, 1e-6)
        expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    else:
        normed = kernels.layer_norm(x, shift, weight, bias, 1e-6)
        expected = torch.nn.functional.layer_norm(exact, (width,), weight.double(), bias.double(), 1e-6)
    assert_near(normed, expected)
    assert torch.equal(x, before)


@EACH
@DTYPES
@pytest.mark.parametrize(("rows", "repeat"), [(1, 1), (301, 301), (300, 60)])
@pytest.mark.parametrize(("heads", "head_dim"), [(4, 24), (16, 72), (16, 80)])
def test_turns_queries_and_keys_alone(
    name: str, dtype: torch.dtype, rows: int, repeat: int, heads: int, head_dim: int
) -> None:
    kernels, device = implementation(name)
    qkv = randn(rows, 3, heads, head_dim, seed=0, device=device, dtype=dtype)
    before = qkv.double()
    angles = randn(repeat, head_dim // 2, seed=1, device=device, dtype=torch.float32) * 9
    kernels.rotate_(qkv, torch.polar(torch.ones_like(angles), angles)[:, None, None, :])
    turn = angles.double().repeat(rows // repeat, 1)[:, None, None, :]
    a, b = before[:, :2].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([a * turn.cos() - b * turn.sin(), a * turn.sin() + b * turn.cos()], dim=-1).flatten(-2)
    assert_near(qkv[:, :2], turned)
    assert torch.equal(qkv[:, 2].double(), before[:, 2])


@EACH
@DTYPES
@pytest.mark.parametrize("used", [0, 1, 57, 59, 60])
@pytest.mark.parametrize("repeat", [20, 60])
@pytest.mark.parametrize(("heads", "head_dim"), [(4, 24), (16, 72)])
def test_clears_values_behind_the_last_segment_in_the_pass_that_turns(
    name: str, dtype: torch.dtype, used: int, repeat: int, heads: int, head_dim: int
) -> None:
    kernels, device = implementation(name)
    qkv = randn(60, 3, heads, head_dim, seed=0, device=device, dtype=dtype)
    qkv[used:] = math.nan
    before = qkv.clone()
    angles = randn(repeat, head_dim // 2, seed=1, device=device, dtype=torch.float32) * 9
    turns = torch.polar(torch.ones_like(angles), angles)[:, None, None, :]
    cu = torch.tensor([0, used // 2, used, used], dtype=torch.int32, device=device)
    kernels.rotate_(qkv, turns, cu)
    assert torch.equal(qkv[:used, 2], before[:used, 2])
    assert torch.count_nonzero(qkv[used:, 2]) == 0
    kernels.rotate_(before[:, :2], turns)
    assert torch.equal(qkv[:used, :2], before[:used, :2])
    assert torch.isnan(qkv[used:, :2]).all()


@EACH
@DTYPES
def test_activations(name: str, dtype: torch.dtype) -> None:
    kernels, device = implementation(name)
    both = randn(77, 2 * 344, seed=0, device=device, dtype=dtype) * 3
    gate, up = both.double().chunk(2, dim=1)
    assert_near(kernels.gated(both, 344), gate * torch.sigmoid(gate) * up)
    assert_near(kernels.quick_gelu(both), both.double() * torch.sigmoid(1.702 * both.double()))
    x = randn(77, 96, seed=1, device=device, dtype=dtype)
    weight, bias = (randn(*shape, seed=2, device=device, dtype=dtype) for shape in ((344, 96), (344,)))
    product = x.double() @ weight.double().T + bias.double()
    assert_near(kernels.gelu_linear(x, weight, bias), torch.nn.functional.gelu(product, approximate="tanh"))


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("patch", "frames"), [(14, 2), (16, 2), (16, 1)])
def test_patches_are_normalised_in_float32_and_rounded_once(
    name: str, dtype: torch.dtype, patch: int, frames: int
) -> None:
    kernels, device = implementation(name)
    high, wide = 5, 7
    image = torch.randint(0, 256, (frames, high * patch, wide * patch, 3), generator=torch.Generator().manual_seed(0))
    mean, std = torch.tensor([0.48, 0.45, 0.40]) * 255, torch.tensor([0.26, 0.25, 0.27]) * 255
    row, column = torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij")
    first = (row * patch * wide + column).flatten()
    origin = torch.stack([first + frame * high * patch * wide for frame in range(frames)], dim=1).int()
    stride = torch.full((high * wide,), wide, dtype=torch.int32)
    arguments = (image.to(torch.uint8).flatten(), origin, stride)
    made = kernels.patches(*(part.to(device) for part in arguments), patch, mean.to(device), std.to(device), dtype)
    levels = image.view(frames, high, patch, wide, patch, 3).permute(1, 3, 0, 2, 4, 5).reshape(high * wide, -1, 3)
    assert torch.equal(made.cpu(), ((levels.float() - mean) / std).to(dtype).flatten(1))


@EACH
@DTYPES
@pytest.mark.parametrize("used", [0, 1, 17, 50])
def test_clears_what_lies_behind_the_last_segment(name: str, dtype: torch.dtype, used: int) -> None:
    kernels, device = implementation(name)
    whole = randn(50, 3, 4, 24, seed=0, device=device, dtype=dtype)
    whole[used:] = math.nan
    before = whole.clone()
    cu = torch.tensor([0, used // 2, used, used], dtype=torch.int32, device=device)
    kernels.clear_tail_(cu, whole[:, 1])
    assert torch.equal(whole[:used], before[:used])
    assert torch.count_nonzero(whole[used:, 1]) == 0
    assert torch.isnan(whole[used:, [0, 2]]).all()


@EACH
@DTYPES
@pytest.mark.parametrize("taps", [4, 16])
def test_adds_an_interpolated_table(name: str, dtype: torch.dtype, taps: int) -> None:
    kernels, device = implementation(name)
    x = randn(53, 1152, seed=0, device=device, dtype=dtype)
    table = randn(99, 1152, seed=1, device=device, dtype=torch.float32)
    weights = randn(53, taps, seed=2, device=device, dtype=torch.float32)
    places = torch.randint(0, 99, (53, taps), generator=torch.Generator().manual_seed(3)).int().to(device)
    summed = (table.double()[places.long()] * weights.double()[..., None]).sum(1)
    assert_near(kernels.add_taps(x, table, places, weights), x.double() + summed)


@EACH
@DTYPES
@pytest.mark.parametrize("width", [8, 2048, 10240])
def test_gathers_lines_and_finds_what_is_not_finite(name: str, dtype: torch.dtype, width: int) -> None:
    kernels, device = implementation(name)
    source = randn(40, width, seed=0, device=device, dtype=dtype)
    source[3, width - 1], source[5, 0], source[7, width // 2] = math.nan, math.inf, -math.inf
    index = torch.tensor([7, 39, 3, 3, 0, 5, 11], dtype=torch.int32, device=device)
    out = torch.empty(len(index), width, dtype=dtype, device=device)
    peaks = kernels.gather(source, index, out)
    assert torch.equal(out.nan_to_num(nan=99), source[index.long()].nan_to_num(nan=99))
    assert peaks.isnan().tolist() == [False, False, True, True, False, False, False]
    expected = source[index.long()].abs().amax(1).float()
    assert torch.equal(peaks.nan_to_num(nan=1, posinf=2), expected.nan_to_num(nan=1, posinf=2))
