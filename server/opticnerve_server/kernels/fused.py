"""The kernels in Triton. Contracts, and the arithmetic they follow, are those of `plain.py`.

Sizes of a model are compile-time constants, so a tower compiles each kernel once or twice; numbers of rows are not, so
no batch compiles anything. Every sum of one row is made by one program: a row does not depend on its neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_ELEMENTS = 1024
"""Numbers that one program of an elementwise kernel takes."""


def _counted(numbers: int) -> int:
    if numbers >= 1 << 31:  # kernels count in int32, whose division is fast
        raise ValueError(f"{numbers} numbers in one launch, kernels count up to {1 << 31}: run smaller batches")
    return numbers


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    x, shift, weight, bias, out, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_SHIFT: tl.constexpr, RMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    dtype = out.dtype.element_ty
    # All loads come first: what stands behind a sum waits for it.
    gain = tl.load(weight + column, inside, 0).to(tl.float32)
    if not RMS:
        offset = tl.load(bias + column, inside, 0).to(tl.float32)
    if HAS_SHIFT:
        missing = tl.load(shift + column, inside, 0)
    values = tl.load(x + row + column, inside, 0).to(tl.float32)
    if HAS_SHIFT:
        values += missing
    if RMS:
        normal = values * tl.rsqrt(tl.sum(values * values) / WIDTH + eps)
        result = normal.to(dtype).to(tl.float32) * gain
    else:
        centred = tl.where(inside, values - tl.sum(values) / WIDTH, 0)
        normal = centred * tl.rsqrt(tl.sum(centred * centred) / WIDTH + eps)
        result = normal * gain + offset
    tl.store(out + row + column, result.to(dtype), inside)


def _normed(
    x: torch.Tensor, shift: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    width = x.shape[-1]
    x = x.contiguous()
    out = torch.empty_like(x)
    rows, block = x.numel() // width, triton.next_power_of_2(width)
    # Few rows wait for their sums, which more warps make faster; many wait for memory, which fewer barriers keep busy.
    warps = 8 if block > 2048 else 4 if rows <= 1024 else 2
    _norm[(rows,)](
        x,
        x if shift is None else shift,
        weight,
        weight if bias is None else bias,
        out,
        eps,
        WIDTH=width,
        BLOCK=block,
        HAS_SHIFT=shift is not None,
        RMS=bias is None,
        num_warps=warps,
    )
    return out


def layer_norm(
    x: torch.Tensor, shift: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    return _normed(x, shift, weight, bias, eps)


def rms_norm(x: torch.Tensor, shift: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _normed(x, shift, weight, None, eps)


@triton.jit(do_not_specialize=["last", "rows", "repeat"])  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    qkv, turns, cu, last, rows, repeat,
    STRIDE: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """One program turns BLOCK pairs of all rows, of which a row has PAIRS and a head HALF.

    A row is PAIRS numbers of q, as many of k and as many of v: who has one of k looks after the one of v at its place.
    """
    numbers = tl.program_id(0) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    row, column = numbers // (2 * PAIRS), numbers % (2 * PAIRS)
    inside = row < rows  # asked of rows, whose length is a constant: 16 bytes stay one access
    address = qkv + row.to(tl.int64) * STRIDE + column
    if CLEAR:
        end = tl.load(cu + last)  # needed last, and asked for first: nothing waits for it
    turn = turns + (row % repeat) * 2 * HALF + numbers % (2 * HALF)
    a, b = tl.split(tl.reshape(tl.load(address, inside, 0).to(tl.float32), (BLOCK, 2)))
    cosine, sine = tl.split(tl.reshape(tl.load(turn, inside, 0), (BLOCK, 2)))
    turned = tl.reshape(tl.join(a * cosine - b * sine, a * sine + b * cosine), (2 * BLOCK,))
    tl.store(address, turned.to(qkv.dtype.element_ty), inside)
    if CLEAR:
        nothing = tl.zeros((2 * BLOCK,), qkv.dtype.element_ty)
        tl.store(address + PAIRS, nothing, inside & (row >= end) & (column >= PAIRS))


def rotate_(qkv: torch.Tensor, turns: torch.Tensor, cu: torch.Tensor | None = None) -> None:
    rows, _, heads, head_dim = qkv.shape
    pairs = heads * head_dim
    block = _ELEMENTS // 2
    _rotate[(triton.cdiv(_counted(2 * rows * pairs), 2 * block),)](
        qkv,
        torch.view_as_real(turns),
        qkv if cu is None else cu,
        0 if cu is None else len(cu) - 1,
        rows,
        turns.shape[0],
        STRIDE=qkv.stride(0),
        PAIRS=pairs,
        HALF=head_dim // 2,
        BLOCK=block,
        CLEAR=cu is not None,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _gated(gate_up, out, INNER: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    address = gate_up + row * (2 * INNER) + column
    gate = tl.load(address, inside, 0).to(tl.float32)
    up = tl.load(address + INNER, inside, 0).to(tl.float32)
    dtype = out.dtype.element_ty
    silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(out + row * INNER + column, (silu * up).to(dtype), inside)


def gated(gate_up: torch.Tensor, inner: int) -> torch.Tensor:
    out = gate_up.new_empty(gate_up.shape[0], inner)
    _gated[(out.shape[0], triton.cdiv(inner, _ELEMENTS))](gate_up, out, INNER=inner, BLOCK=_ELEMENTS)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _quick_gelu(x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    number = tl.program_id(0).to(tl.int64) * WIDTH + column
    value = tl.load(x + number, inside, 0).to(tl.float32)
    tl.store(out + number, (value * tl.sigmoid(1.702 * value)).to(out.dtype.element_ty), inside)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    grid = (x.numel() // width, triton.cdiv(width, _ELEMENTS))
    _quick_gelu[grid](x, out, WIDTH=width, BLOCK=_ELEMENTS)
    return out


def gelu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    # cuBLASLt's epilogue is the tanh formula. torch has no public name for it.
    activated: Any = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return activated.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]


@triton.jit  # type: ignore[untyped-decorator]
def _patches(  # type: ignore[no-untyped-def]
    pixels, origin, stride, mean, std, out,
    PATCH: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program makes one frame of one patch: PATCH lines of LINE bytes each."""
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    first = tl.load(origin + place).to(tl.int64)
    step = tl.load(stride + tl.program_id(0)).to(tl.int64)
    line, byte = tl.arange(0, LINES)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (line < PATCH) & (byte < LINE)
    level = tl.load(pixels + (first + step * line) * LINE + byte, inside, 0).to(tl.float32)
    channel = byte % 3
    # Division rounded to nearest, as torch's: the default one may be off in the last bit.
    value = tl.div_rn(level - tl.load(mean + channel), tl.load(std + channel) + level * 0)
    tl.store(out + place * (PATCH * LINE) + line * LINE + byte, value.to(out.dtype.element_ty), inside)


def patches(
    pixels: torch.Tensor,
    origin: torch.Tensor,
    stride: torch.Tensor,
    patch: int,
    mean: torch.Tensor,
    std: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    rows, frames = origin.shape
    line = 3 * patch
    out = torch.empty(rows, frames * patch * line, dtype=dtype, device=pixels.device)
    _patches[(rows, frames)](
        pixels,
        origin,
        stride,
        mean,
        std,
        out,
        PATCH=patch,
        LINES=triton.next_power_of_2(patch),
        LINE=line,
        BLOCK=triton.next_power_of_2(line),
    )
    return out


@triton.jit(do_not_specialize=["last", "rows"])  # type: ignore[untyped-decorator]
def _clear_tail(  # type: ignore[no-untyped-def]
    x, cu, last, rows, STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program looks after ROWS rows, and has nothing to do before the last offset."""
    end = tl.load(cu + last)
    first = tl.program_id(0) * ROWS
    column = tl.arange(0, BLOCK)
    place = column // HEAD * HEAD_STRIDE + column % HEAD
    nothing = tl.zeros((BLOCK,), x.dtype.element_ty)
    for row in range(tl.maximum(first, end), tl.minimum(first + ROWS, rows)):
        tl.store(x + tl.cast(row, tl.int64) * STRIDE + place, nothing, column < WIDTH)


def clear_tail_(cu: torch.Tensor, rows: torch.Tensor) -> None:
    count, heads, head_dim = rows.shape
    width, each = heads * head_dim, 16
    _clear_tail[(triton.cdiv(count, each),)](
        rows,
        cu,
        len(cu) - 1,
        count,
        STRIDE=rows.stride(0),
        HEAD_STRIDE=rows.stride(1),
        HEAD=head_dim,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=each,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _add_taps(  # type: ignore[no-untyped-def]
    x, table, taps, weights, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    position = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        place = tl.load(taps + row * TAPS + tap).to(tl.int64)
        position += tl.load(weights + row * TAPS + tap) * tl.load(table + place * WIDTH + column, inside, 0)
    dtype = out.dtype.element_ty
    value = tl.load(x + row * WIDTH + column, inside, 0).to(tl.float32) + position.to(dtype).to(tl.float32)
    tl.store(out + row * WIDTH + column, value.to(dtype), inside)


def add_taps(x: torch.Tensor, table: torch.Tensor, taps: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out, width = torch.empty_like(x), x.shape[1]
    block = triton.next_power_of_2(width)
    _add_taps[(x.shape[0],)](x, table, taps, weights, out, WIDTH=width, BLOCK=block, TAPS=taps.shape[1])
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _gather(source, index, out, peaks, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(index + row).to(tl.int64)
    peak = tl.zeros((BLOCK,), tl.float32)
    strange = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < WIDTH
        stored = tl.load(source + place * WIDTH + column, inside, 0)
        tl.store(out + row * WIDTH + column, stored, inside)
        value = stored.to(tl.float32)
        peak = tl.maximum(peak, tl.abs(value))
        strange |= (value != value).to(tl.int32)
    tl.store(peaks + row, tl.where(tl.max(strange) > 0, float("nan"), tl.max(peak)))


def gather(source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    width = source.shape[1]
    peaks = torch.empty(len(index), dtype=torch.float32, device=source.device)
    if len(index):
        block = min(4096, triton.next_power_of_2(width))
        _gather[(len(index),)](source, index, out, peaks, WIDTH=width, BLOCK=block)
    return peaks
