"""The shared memory that items pass through: pixels in, rows out.

One anonymous memory file (memfd) is mapped by every engine, which also registers it with CUDA, and by every front-end.
It has no name in any file system, so nothing can be left behind however a process dies. Only the scheduler allocates,
in memory that it does not map.
"""

from __future__ import annotations

import bisect
import mmap
import os

import numpy as np
import numpy.typing as npt

ALIGNMENT = 4096
"""Slots begin on page boundaries: a copy engine and a decoder never share a page of two owners."""


class Arena:
    """A mapping of the shared memory. `bytes` is a uint8 array over all of it; slices of it are views, never copies."""

    def __init__(self, fd: int, size: int) -> None:
        """Map `size` bytes of `fd`, which stays open and belongs to the caller."""
        self.size = size
        self._map = mmap.mmap(fd, size)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    @staticmethod
    def create(size: int) -> int:
        """A new memory file of `size` bytes, all zero, whose pages take memory only when first written."""
        fd = os.memfd_create("opticnerve-slots")
        os.ftruncate(fd, size)
        return fd


class SlotAllocator:
    """First fit over a sorted list of free ranges, neighbours merged on release. For one thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free_bytes = size
        self._starts = [0]
        self._sizes = [size]

    @staticmethod
    def rounded(size: int) -> int:
        """The bytes that a slot of `size` bytes takes."""
        return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT

    def allocate(self, size: int) -> int | None:
        """The start of a free range of at least `size` bytes, or None when there is none in one piece."""
        size = self.rounded(size)
        for i, available in enumerate(self._sizes):
            if available >= size:
                start = self._starts[i]
                if available == size:
                    del self._starts[i], self._sizes[i]
                else:
                    self._starts[i] += size
                    self._sizes[i] -= size
                self.free_bytes -= size
                return start
        return None

    def release(self, start: int, size: int) -> None:
        """Return a range that `allocate` gave for `size`."""
        size = self.rounded(size)
        i = bisect.bisect_left(self._starts, start)
        self.free_bytes += size
        if i < len(self._starts) and start + size == self._starts[i]:
            self._starts[i] = start
            self._sizes[i] += size
        else:
            self._starts.insert(i, start)
            self._sizes.insert(i, size)
        if i > 0 and self._starts[i - 1] + self._sizes[i - 1] == start:
            self._sizes[i - 1] += self._sizes[i]
            del self._starts[i], self._sizes[i]
