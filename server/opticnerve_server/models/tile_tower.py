"""What the towers of square tiles share: their configuration, their two buffers, and the way from pixels to patches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from ..types import Capacity, ItemPlan
from .base import PIXELS, BufferSpec
from .config import GridConfig, ModelError
from .layers import Linear
from .tiles import TilePlanner
from .weights import TensorSource


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig(GridConfig):
    """What `vision_config` says of every tower of tiles, in the names that most of them use."""

    KEYS: ClassVar[Mapping[str, str]] = {
        "depth": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "in_channels": "num_channels",
        "out_hidden_size": "text_config.hidden_size",
    }

    temporal_patch_size: int = 1
    intermediate_size: int
    image_size: int

    @property
    def grid_side(self) -> int:
        """Patches along one side of a tile."""
        return self.image_size // self.patch_size

    def check(self) -> None:
        """See GridConfig."""
        GridConfig.check(self)
        if self.image_size % (self.patch_size * self.spatial_merge_size):
            raise ModelError(
                f"{self.key('image_size')} is {self.image_size}, must be a multiple of the "
                f"{self.patch_size * self.spatial_merge_size} pixels of a token"
            )

    def check_heads(self) -> None:
        """See GridConfig."""
        if self.hidden_size % self.num_heads:
            raise ModelError(
                f"{self.key('hidden_size')} is {self.hidden_size}, must be a multiple of the {self.num_heads} heads"
            )


class TilePatches:
    """From packed uint8 tiles to normalised patches, which a linear layer embeds."""

    def __init__(self, planner: TilePlanner, device: torch.device) -> None:
        self.grid_side, self.patch = planner.grid_side, planner.patch
        self.mean = torch.tensor(planner.mean, device=device) * 255
        self.std = torch.tensor(planner.std, device=device) * 255

    def __call__(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Of `pixels` uint8 [tiles x side x side x 3] the patches [tiles x patches, patch x patch x 3] in raster order.

        In their own dtype until they are normalised, then `dtype`.
        """
        g, p = self.grid_side, self.patch
        ordered = pixels.view(-1, g, p, g, p, 3).transpose(2, 3)
        return self.normalised(ordered).to(dtype).reshape(-1, p * p * 3)

    def normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        """(x - 255 mean) / (255 std) in float32, the arithmetic of the torchvision-backed processors."""
        return (pixels.float() - self.mean) / self.std


class BFloat16Patches(TilePatches):
    """Patches normalised in bfloat16: whatever the tower's dtype, they are rounded as the official processor does."""

    def normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        """See TilePatches."""
        mean, std = (self.mean / 255).bfloat16(), (self.std / 255).bfloat16()
        return (pixels.bfloat16() * (1 / 255) - mean) / std


def patch_linear(
    source: TensorSource, name: str, config: TileConfig, *, bias: bool = True, flat: bool = False
) -> Linear:
    """The convolution whose stride is its kernel, as a linear layer over what TilePatches returns.

    `flat` if the file has it as a linear layer [width, 3 x patch x patch].
    """
    width, patch = config.hidden_size, config.patch_size
    shape = (3 * patch**2,) if flat else (3, patch, patch)
    weight = source.take(f"{name}.weight", width, *shape).view(width, 3, patch, patch).permute(0, 2, 3, 1)
    return Linear(weight.reshape(width, -1).contiguous(), source.take(f"{name}.bias", width) if bias else None)


class TileTower(ABC):
    """Base of the towers with one path of tiles; see `base.Tower`. Lines are the tokens of the tiles in their order."""

    prefixes: ClassVar[Mapping[str, str]]
    """See `weights.open_tensors`."""
    constant_rows: torch.Tensor | None = None

    def __init__(self, planner: TilePlanner, source: TensorSource) -> None:
        self.planner = planner
        self.device = source.device
        self.dtype = source.dtype
        self.tile_patches = (BFloat16Patches if planner.bfloat16 else TilePatches)(planner, source.device)

    @classmethod
    @abstractmethod
    def read_config(cls, config: Mapping[str, Any]) -> TileConfig:
        """The tower's part of a parsed config.json. Raises ModelError."""

    @classmethod
    @abstractmethod
    def build_planner(cls, architecture: str, config: TileConfig, processor: Mapping[str, Any]) -> TilePlanner:
        """The planner of this configuration and processor. Raises ProcessorError."""

    @abstractmethod
    def forward(self, path: str, buffers: Mapping[str, torch.Tensor], capacity: Capacity) -> torch.Tensor:
        """See `base.Tower.forward`; tokens_per_unit lines a unit."""

    def shuffled(self, x: torch.Tensor) -> torch.Tensor:
        """Of patches [tiles, patches, width] the tokens [tiles x tokens, merge x merge x width], both in raster order:
        the patches of a token side by side, as pixel shuffle has them.
        """
        side, merge, width = self.planner.grid_side // self.planner.merge, self.planner.merge, x.shape[2]
        return x.reshape(-1, side, merge, side, merge, width).transpose(2, 3).reshape(-1, merge * merge * width)

    def buffers(self, path: str, capacity: Capacity) -> dict[str, BufferSpec]:
        """See `base.Tower.buffers`."""
        return {
            "cu_tiles": BufferSpec((capacity.units + 1,), "int32"),
            PIXELS: BufferSpec((capacity.units * self.planner.side**2 * 3,), "uint8"),
        }

    def fill(self, path: str, parts: Sequence[ItemPlan], out: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """See `base.Tower.fill`. Tiles behind the last one are computed, but attend to nothing."""
        cu = out["cu_tiles"]
        used = sum(part.paths[path].units for part in parts)
        cu[...] = np.minimum(np.arange(len(cu)), used) * self.planner.paths[path].rows_per_unit

    def gather_index(self, parts: Sequence[ItemPlan], lines: Mapping[str, int]) -> npt.NDArray[np.int32]:
        """See `base.Tower.gather_index`."""
        return np.arange(sum(part.tokens for part in parts), dtype=np.int32)
