"""Building blocks of the towers: weights in small frozen dataclasses, inference only.

Shapes in names: r rows (patches), n tokens, h heads, d head size. Weights stay fused as they are stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import torch
import torch.nn.functional as F

from .. import kernels
from ..attention.base import AttentionBackend
from .base import PIXELS
from .grid import GridPlanner
from .weights import TensorSource


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b, with W [outputs, inputs]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def take(cls, source: TensorSource, name: str, inputs: int, outputs: int, *, bias: bool = True) -> Self:
        weight = source.take(f"{name}.weight", outputs, inputs)
        return cls(weight, source.take(f"{name}.bias", outputs) if bias else None)

    @classmethod
    def joined(cls, layers: Iterable[Self]) -> Self:
        """The layer whose outputs are those of `layers`, one behind another; all have biases or none has."""
        stored = list(layers)
        biases = [layer.bias for layer in stored if layer.bias is not None]
        return cls(torch.cat([layer.weight for layer in stored]), torch.cat(biases) if biases else None)

    def padded(self, *, inputs: int = 0, outputs: int = 0) -> Self:
        """The same layer with zero weights and biases up to these sizes."""
        more_outputs = max(0, outputs - self.weight.shape[0])
        weight = F.pad(self.weight, (0, max(0, inputs - self.weight.shape[1]), 0, more_outputs))
        return type(self)(weight, None if self.bias is None else F.pad(self.bias, (0, more_outputs)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def onto(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """x += y W^T where x [..., outputs] lies, rounded once; of a layer that `Stream.joined_by` returned."""
        assert self.bias is None
        x.view(-1, x.shape[-1]).addmm_(y.flatten(0, -2), self.weight.t())

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """GELU, by its tanh formula, of the layer's output; the layer has a bias."""
        assert self.bias is not None
        return kernels.gelu_linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """LayerNorm over the last axis of x + shift, statistics in float32."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float = 1e-6
    shift: torch.Tensor | None = None  # float32, by `Stream.read_by`

    @classmethod
    def take(cls, source: TensorSource, name: str, size: int, eps: float = 1e-6) -> Self:
        return cls(source.take(f"{name}.weight", size), source.take(f"{name}.bias", size), eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.layer_norm(x, self.shift, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """RMSNorm over the last axis of x + shift: statistics in float32, rounded to x's dtype before the weight."""

    weight: torch.Tensor
    eps: float = 1e-6
    shift: torch.Tensor | None = None  # float32, by `Stream.read_by`

    @classmethod
    def take(cls, source: TensorSource, name: str, size: int, eps: float = 1e-6) -> Self:
        return cls(source.take(f"{name}.weight", size), eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm(x, self.shift, self.weight, self.eps)


Norm = TypeVar("Norm", bound=LayerNorm | RMSNorm)


class Stream:
    """The residual stream x [rows, width] of a tower, while its weights are read in the order in which they run.

    A product adds to x where it lies: its epilogue reads and writes x once, and nothing else passes over it. That
    epilogue has no bias, so x lacks the biases of all layers that have joined it: `lacking`, one row, which the norms
    that read x add.
    """

    def __init__(self) -> None:
        self.lacking: torch.Tensor | None = None  # float32 [width]

    def joined_by(self, layer: Linear, scale: torch.Tensor | None = None) -> Linear:
        """The next layer whose outputs, times `scale` [width], are added to x: for `Linear.onto`."""
        weight, bias = layer.weight, layer.bias
        if scale is not None:
            weight = (scale.float()[:, None] * weight).to(weight.dtype)
        if bias is not None:
            bias = bias.float() if scale is None else scale.float() * bias
            self.lacking = bias if self.lacking is None else self.lacking + bias
        return Linear(weight, None)

    def read_by(self, norm: Norm) -> Norm:
        """The next norm that reads x, some of its rows side by side if it is wider."""
        if self.lacking is None:
            return norm
        return replace(norm, shift=self.lacking.repeat(len(norm.weight) // len(self.lacking)))

    def settled(self, x: torch.Tensor) -> torch.Tensor:
        """x with all that it lacks, for what reads it behind the last layer and is no norm."""
        return x if self.lacking is None else (x + self.lacking).to(x.dtype)


class Rope:
    """The two-dimensional rotary embedding: a quarter of a head's angles turn with the row, a quarter with the column.

    Angles are computed where they are used, in float32, so an image may be any number of patches high or wide.
    """

    def __init__(self, head_dim: int, theta: float, device: torch.device) -> None:
        half = head_dim // 2
        # Computed on the CPU: the last bit of these powers then does not depend on the device.
        frequencies = 1.0 / (theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half))
        self.frequencies = frequencies.to(device)

    def turns(self, position: torch.Tensor) -> torch.Tensor:
        """Unit complex numbers, complex64 [rows, 1, 1, head_dim / 2], of `position` int32 [rows, 2] (row, column)."""
        angles = (position.float().unsqueeze(-1) * self.frequencies).flatten(1)[:, None, None, :]
        return torch.polar(torch.ones_like(angles), angles)


def paired(x_h: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [heads x head_dim, ...] of a projection, where a head's halves turn against each other, as `kernels.rotate_`
    wants: the two numbers of a pair side by side.

    Attention does not see the order of the numbers within a head, as long as it is that of q and of k.
    """
    halves = x_h.view(heads, 2, -1, *x_h.shape[1:])
    return halves.transpose(1, 2).reshape(x_h.shape)


@dataclass(frozen=True, slots=True)
class Segments:
    """Attention sequences of packed rows: `cu` int32 [segments + 1] on the device, `longest` on the host."""

    cu: torch.Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Multi-head attention within segments, whose output joins a stream; qkv is one [3 x heads x head_dim, width]."""

    qkv: Linear
    proj: Linear
    heads: int
    backend: AttentionBackend

    @classmethod
    def take(
        cls,
        source: TensorSource,
        name: str,
        width: int,
        heads: int,
        backend: AttentionBackend,
        stream: Stream,
        *,
        qkv_bias: bool = True,
        proj_bias: bool = True,
    ) -> Self:
        stored = Linear.take(source, f"{name}.qkv", width, 3 * width, bias=qkv_bias)
        qkv = Linear(
            _qk_paired(stored.weight, heads), stored.bias if stored.bias is None else _qk_paired(stored.bias, heads)
        )
        proj = stream.joined_by(Linear.take(source, f"{name}.proj", width, width, bias=proj_bias))
        return cls(qkv, proj, heads, backend)

    def onto(self, x: torch.Tensor, y: torch.Tensor, turns: torch.Tensor, segments: Segments) -> None:
        """Add the attention of `y`, the norm of `x`, to `x` where it lies."""
        rows = x.shape[0]
        qkv_r3hd = self.qkv(y).view(rows, 3, self.heads, -1)
        cu, longest = segments.cu, segments.longest
        kernels.rotate_(qkv_r3hd, turns, cu)
        q, k, v = qkv_r3hd.unbind(1)
        self.proj.onto(x, self.backend.attend(q, k, v, cu, cu, longest, longest, rows).flatten(1))


INNER_ALIGNMENT = 64
"""Inner widths of MLPs are padded with zeros to a multiple, which changes no result. Rows that do not begin at 16 bytes
send cuBLAS to kernels three times slower (published widths are as odd as 3420), and it steps through them by 64: on one
H200 the product behind 4304 takes 14.5 us for 448 rows and 57.8 for 3584, behind 4352 11.6 and 53.4.
"""


def _aligned(inner: int) -> int:
    return -(-inner // INNER_ALIGNMENT) * INNER_ALIGNMENT


@dataclass(frozen=True, slots=True)
class GeluMLP:
    """fc2(gelu(fc1(x))), GELU by its tanh formula; its output joins a stream."""

    fc1: Linear
    fc2: Linear

    @classmethod
    def take(cls, source: TensorSource, names: tuple[str, str], width: int, inner: int, stream: Stream) -> Self:
        first, second = names
        return cls(
            Linear.take(source, first, width, inner).padded(outputs=_aligned(inner)),
            stream.joined_by(Linear.take(source, second, inner, width).padded(inputs=_aligned(inner))),
        )

    def onto(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the output for `y`, the norm of `x`, to `x` where it lies."""
        self.fc2.onto(x, self.fc1.gelu(y))


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """down(silu(gate(x)) * up(x)), gate and up as one product."""

    gate_up: Linear
    down: Linear

    @classmethod
    def take(
        cls, source: TensorSource, name: str, width: int, inner: int, *, bias: bool, stream: Stream | None = None
    ) -> Self:
        """With a `stream`, which its output joins, for `onto`."""
        aligned = _aligned(inner)
        stored = (Linear.take(source, f"{name}.{part}_proj", width, inner, bias=bias) for part in ("gate", "up"))
        down = Linear.take(source, f"{name}.down_proj", inner, width, bias=bias).padded(inputs=aligned)
        gate_up = Linear.joined(layer.padded(outputs=aligned) for layer in stored)
        return cls(gate_up, down if stream is None else stream.joined_by(down))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._gated(x))

    def onto(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the output for `y`, the norm of `x`, to `x` where it lies."""
        self.down.onto(x, self._gated(y))

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.gated(self.gate_up(x), self.down.weight.shape[1])


def _qk_paired(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    q, k, v = qkv.chunk(3)
    return torch.cat([paired(q, heads), paired(k, heads), v])


class PatchLevels:
    """From packed uint8 images to their patches.

    `pixels` holds the resized images, uint8 RGB rows from the top, one behind another: a still's frame once, a video's
    frames one behind another. It is read in lines of patch x 3 bytes, what one patch has of one image row: widths are
    multiples of the patch, so every patch is `patch` whole lines. `origin` int32 [rows, temporal_patch] is the first
    line of a patch in each of its frames (a still repeats its one), `stride` int32 [rows] the lines of an image row.
    """

    def __init__(
        self, patch: int, device: torch.device, mean: Sequence[float] = (0, 0, 0), std: Sequence[float] = (1, 1, 1)
    ) -> None:
        """`mean` and `std` by channel, of levels 0 to 255: what is returned is (level - mean) / std."""
        self.patch = patch
        self.mean, self.std = (torch.tensor(values, dtype=torch.float32, device=device) for values in (mean, std))

    def __call__(self, buffers: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """[rows, temporal_patch x patch x patch x 3], the last axes of a patch being frame, row, column, channel."""
        origin, stride = buffers["origin"], buffers["stride"]
        return kernels.patches(buffers[PIXELS], origin, stride, self.patch, self.mean, self.std, dtype)


def normalised_levels(patch: int, device: torch.device, mean: Sequence[float], std: Sequence[float]) -> PatchLevels:
    """Patches normalised by `mean` and `std` of values scaled to 0..1.

    (x - 255 mean) / (255 std), the arithmetic of the torchvision-backed processors: bit-equal to theirs.
    """
    levels = PatchLevels(patch, device, mean, std)
    levels.mean *= 255
    levels.std *= 255
    return levels


class PatchEmbed:
    """From packed uint8 images to embedded patches [rows, width], by a convolution whose stride is its kernel.

    `flat` if the file has it as a linear layer [width, 3 x temporal_patch x patch x patch] over the same order, not
    `frames` if as a convolution over stills.
    """

    def __init__(
        self,
        source: TensorSource,
        planner: GridPlanner,
        width: int,
        *,
        bias: bool,
        flat: bool = False,
        frames: bool = True,
    ) -> None:
        self.levels = normalised_levels(planner.patch, source.device, planner.mean, planner.std)
        kernel = (3, planner.temporal_patch, planner.patch, planner.patch)
        shape: tuple[int, ...] = (math.prod(kernel),) if flat else kernel if frames else (3, *kernel[2:])
        weight = source.take("patch_embed.proj.weight", width, *shape).view(width, *kernel)
        # Stored as (channel, frame, row, column); gathered as (frame, row, column, channel).
        ordered = weight.permute(0, 2, 3, 4, 1).reshape(width, -1).contiguous()
        self.proj = Linear(ordered, source.take("patch_embed.proj.bias", width) if bias else None)

    def __call__(self, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.proj(self.levels(buffers, self.proj.weight.dtype))
