"""Host memory that the processes of one vLLM engine share, without a name in any file system.

What is in /dev/shm outlives an engine that is killed, which is how vLLM stops its own, and a container has little.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from opticnerve.tensors import Array

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # of linux/falloc.h
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class SharedMemory:
    """Arrays at offsets of one anonymous file, each in pages of its own. Not for two threads at once."""

    def __init__(self) -> None:
        self._file = os.memfd_create("opticnerve-rows")
        self._end = 0

    @property
    def path(self) -> str:
        """How other processes of this user and this process namespace open it, while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def put(self, array: Array) -> int:
        """Copies a C-contiguous array in; returns its offset. Raises OSError where there is no memory."""
        offset, nbytes = self._end, array.nbytes
        os.posix_fallocate(self._file, offset, nbytes)  # memory that is missing is an OSError here, later a SIGBUS
        data = array.reshape(-1).view(np.uint8).data
        written = 0
        while written < nbytes:  # one call writes 2 GiB at most
            written += os.pwrite(self._file, data[written:], offset + written)
        self._end += _pages(nbytes)  # the file is sparse: offsets are not used again
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Gives the memory of an array back. Whoever has mapped it reads zeros."""
        if _libc.fallocate(self._file, _PUNCH_HOLE | _KEEP_SIZE, offset, _pages(nbytes)):
            raise OSError(ctypes.get_errno(), "fallocate")

    def close(self) -> None:
        """Gives all memory back, once nobody maps it any more."""
        os.close(self._file)


def read(path: str, offset: int, nbytes: int) -> mmap.mmap:
    """Maps an array of another process's SharedMemory: no copy. Writes stay with the writer."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY, offset=offset)


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
