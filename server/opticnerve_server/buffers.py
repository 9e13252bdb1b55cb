"""The memory that batches pass through on the device, and who owns it when.

    slot (pinned host) --copy in--> landing --move--> arena --graph--> path output --gather--> ring --copy out--> slot
                  staging (pinned host) --metadata--> arena      staging --index--> gather

            batch n-1            batch n              batch n+1
    landing                      [block 0: moved]     [block 1: pixels arriving]
    staging                      [block 0: sent]
    arena                        [read by replay n]                              one, on the compute stream alone
    output                       [written by replay n]                           one a path, on the compute stream alone
    ring    [half 1: copied out] [half 0: gathered]

Only the compute stream touches arena and outputs, so their next use follows their last by stream order. The others are
reused two batches later: a landing block by copies that wait on the device until its batch is computed, ring half and
staging block when the host knows that the batch's rows have been copied out. On a CPU there are no streams and every
step is done when its call returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .models.base import PIXELS, BufferSpec

ALIGNMENT = 256
"""Bytes; every static buffer begins at a multiple, as CUDA allocations do, so that vector loads are legal."""

TORCH_DTYPES = {"uint8": torch.uint8, "int32": torch.int32, "float32": torch.float32}


def aligned(size: int) -> int:
    """`size` rounded up to ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the static buffers of one capacity lie in a block of bytes: metadata first, pixels last."""

    specs: dict[str, BufferSpec]
    offsets: dict[str, int]
    meta_bytes: int  # everything before the pixels
    size: int

    @staticmethod
    def of(specs: Mapping[str, BufferSpec]) -> Packing:
        names = [name for name in specs if name != PIXELS]
        offsets, end = {}, 0
        for name in names:
            offsets[name] = end
            end = aligned(end + specs[name].nbytes)
        offsets[PIXELS] = end
        return Packing({name: specs[name] for name in offsets}, offsets, end, end + specs[PIXELS].nbytes)

    def tensors(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """Typed views of a uint8 block of at least `size` bytes."""
        return {
            name: block[at : at + self.specs[name].nbytes].view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
            for name, spec in self.specs.items()
            for at in [self.offsets[name]]
        }

    def metadata(self, block: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[np.generic]]:
        """Arrays over a host block of at least `meta_bytes` bytes, set to their pad values; all buffers but pixels."""
        block[: self.meta_bytes] = 0
        arrays: dict[str, npt.NDArray[np.generic]] = {}
        for name, spec in self.specs.items():
            if name != PIXELS:
                arrays[name] = np.ndarray(spec.shape, spec.dtype, block, self.offsets[name])
                if spec.pad:
                    arrays[name].fill(spec.pad)
        return arrays


class Staging:
    """One of two pinned host blocks that a batch's metadata and gather index are written into and sent from.

    It may be opened again when the batch that used it has been computed: what was sent has arrived by then.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self.block = self._allocate(size)
        self._used = 0

    def open(self) -> None:
        """Begin a batch."""
        self._used = 0

    def take(self, size: int) -> torch.Tensor:
        """The next `size` bytes; for an eager batch that needs more than any captured one, fresh memory."""
        at, end = self._used, self._used + size
        if end > self.block.numel():
            return self._allocate(size)
        self._used = aligned(end)
        return self.block[at:end]

    def _allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)


class Landing:
    """One of two places where the pixels of the open batch arrive, part behind part, in the order of their joining."""

    def __init__(self, pixel_bytes: int, device: torch.device) -> None:
        self.block = torch.empty(pixel_bytes, dtype=torch.uint8, device=device)
        self._usual = self.block
        self.used = 0

    def open(self) -> None:
        """Begin a batch. Copies await what still reads the block; one of its own is kept alive by its batch."""
        self.block = self._usual
        self.used = 0

    def add(self, pixels: torch.Tensor) -> int:
        """Copy a part's pixels, uint8 on the host, behind the others on the current stream; returns where they begin.

        Parts join a batch while it fits the largest graph, whose pixels the block holds. A part beyond that is alone in
        its batch and gets a block of its own.
        """
        at, size = self.used, pixels.numel()
        if at + size > self.block.numel():
            assert not at, f"{size} bytes of pixels behind {at} exceed a landing block of {self.block.numel()}"
            self.block = torch.empty(size, dtype=torch.uint8, device=self.block.device)
        self.block[at : at + size].copy_(pixels, non_blocking=True)
        self.used += size
        return at


class Ring:
    """Two halves that gathered rows are copied out from, in turn, and where the peaks of these rows arrive."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._halves = [torch.empty(rows, width, dtype=dtype, device=device) for _ in range(2)]
        self._pinned = device.type == "cuda"
        self._peaks = [self._host(rows) for _ in range(2)]

    @property
    def nbytes(self) -> int:
        return sum(half.nbytes for half in self._halves)

    def half(self, turn: int, rows: int) -> torch.Tensor:
        """The first `rows` of a half; for an eager batch with more rows than any graph, a fresh tensor."""
        half = self._halves[turn]
        return half[:rows] if rows <= half.shape[0] else half.new_empty(rows, half.shape[1])

    def peaks(self, turn: int, rows: int) -> torch.Tensor:
        """Host memory for the peaks of as many rows, float32 [rows]."""
        peaks = self._peaks[turn]
        return peaks[:rows] if rows <= peaks.shape[0] else self._host(rows)

    def _host(self, rows: int) -> torch.Tensor:
        return torch.empty(rows, dtype=torch.float32, pin_memory=self._pinned)
