"""Building blocks of the towers: weights in small frozen dataclasses, inference only.

Shapes in names: r rows (patches), n tokens, h heads, d head size. Weights stay fused as they are stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F

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


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """LayerNorm over the last axis, statistics in float32."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float = 1e-6

    @classmethod
    def take(cls, source: TensorSource, name: str, size: int, eps: float = 1e-6) -> Self:
        return cls(source.take(f"{name}.weight", size), source.take(f"{name}.bias", size), eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """RMSNorm over the last axis: statistics in float32, rounded to x's dtype before the weight is applied."""

    weight: torch.Tensor
    eps: float = 1e-6

    @classmethod
    def take(cls, source: TensorSource, name: str, size: int, eps: float = 1e-6) -> Self:
        return cls(source.take(f"{name}.weight", size), eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (x32 * scale).to(x.dtype)


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


def rotate(x_rkhd: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Turn each pair of neighbouring numbers of a head, in float32, and round back to x's dtype.

    One complex product, where halves that turn against each other would take a dozen kernels.
    """
    pairs = torch.view_as_complex(x_rkhd.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x_rkhd.dtype)


def paired(x_h: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [heads x head_dim, ...] of a projection, where a head's halves turn against each other, as `rotate` wants.

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
    """Multi-head attention within segments, with a fused qkv projection [3 x heads x head_dim, width]."""

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
        *,
        qkv_bias: bool = True,
        proj_bias: bool = True,
    ) -> Self:
        stored = Linear.take(source, f"{name}.qkv", width, 3 * width, bias=qkv_bias)
        qkv = Linear(
            _qk_paired(stored.weight, heads), stored.bias if stored.bias is None else _qk_paired(stored.bias, heads)
        )
        return cls(qkv, Linear.take(source, f"{name}.proj", width, width, bias=proj_bias), heads, backend)

    def __call__(self, x: torch.Tensor, turns: torch.Tensor, segments: Segments) -> torch.Tensor:
        rows = x.shape[0]
        qkv_r3hd = self.qkv(x).view(rows, 3, self.heads, -1)
        q, k = rotate(qkv_r3hd[:, :2], turns).unbind(1)
        cu, longest = segments.cu, segments.longest
        attended = self.backend.attend(q, k, qkv_r3hd[:, 2], cu, cu, longest, longest, rows)
        return self.proj(attended.flatten(1))


def _qk_paired(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    q, k, v = qkv.chunk(3)
    return torch.cat([paired(q, heads), paired(k, heads), v])


class PatchGather:
    """From packed uint8 images to their patches.

    `pixels` holds the resized images, uint8 RGB rows from the top, one behind another: a still's frame once, a video's
    frames one behind another. It is read in lines of patch x 3 bytes, what one patch has of one image row: widths are
    multiples of the patch, so every patch is `patch` whole lines. `origin` int32 [rows, temporal_patch] is the first
    line of a patch in each of its frames (a still repeats its one), `stride` int32 [rows] the lines of an image row.
    """

    def __init__(self, patch: int, device: torch.device) -> None:
        self.patch = patch
        self.lines = torch.arange(patch, dtype=torch.int32, device=device)

    def __call__(self, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Levels 0 to 255, float32 [rows, temporal_patch, patch, patch, 3]."""
        origin, stride = buffers["origin"], buffers["stride"]
        lines = origin[:, :, None] + stride[:, None, None] * self.lines
        gathered = buffers[PIXELS].view(-1, self.patch * 3).index_select(0, lines.flatten())
        return gathered.view(*origin.shape, self.patch, self.patch, 3).float()


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
        self.gather = PatchGather(planner.patch, source.device)
        kernel = (3, planner.temporal_patch, planner.patch, planner.patch)
        shape: tuple[int, ...] = (math.prod(kernel),) if flat else kernel if frames else (3, *kernel[2:])
        weight = source.take("patch_embed.proj.weight", width, *shape).view(width, *kernel)
        # Stored as (channel, frame, row, column); gathered as (frame, row, column, channel).
        ordered = weight.permute(0, 2, 3, 4, 1).reshape(width, -1).contiguous()
        self.proj = Linear(ordered, source.take("patch_embed.proj.bias", width) if bias else None)
        self.mean = torch.tensor(planner.mean, device=source.device) * 255
        self.std = torch.tensor(planner.std, device=source.device) * 255

    def patches(self, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Normalised patches, float32 [rows, temporal_patch, patch, patch, 3].

        (x - 255 mean) / (255 std), the arithmetic of the torchvision-backed processors: bit-equal to theirs.
        """
        return (self.gather(buffers) - self.mean) / self.std

    def __call__(self, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.proj(self.patches(buffers).flatten(1).to(self.proj.weight.dtype))
