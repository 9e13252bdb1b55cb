"""Learned position tables that are resized to the grid of each image: cubic, at the centres of the patches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from .. import kernels
from .base import BufferSpec


class TablePositions:
    """Position embeddings by two row buffers, "taps" and "weights": 4 rows and 4 columns of the table a patch."""

    row_buffers: Mapping[str, BufferSpec] = {
        "taps": BufferSpec((2, 4), "int32"),
        "weights": BufferSpec((2, 4), "float32"),
    }

    def __init__(self, table: torch.Tensor, side: int) -> None:
        """`table` is [side x side, width]."""
        self.table = table.float()  # interpolated in float32, from values of the tower's dtype
        self.side = side

    def rows(self, h: int, w: int, position: npt.NDArray[np.generic]) -> dict[str, npt.NDArray[np.generic]]:
        """The buffers' rows for a grid of h x w patches, whose rows and columns are `position` [h * w, 2]."""
        row, column = position.T
        along = [interpolation(h, self.side)[row], interpolation(w, self.side)[column]]
        return {
            buffer: np.stack([axis[name] for axis in along], axis=1)
            for buffer, name in (("taps", "tap"), ("weights", "weight"))
        }

    def __call__(self, x: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """`x` [rows, width] with its positions: 16 lines of the table each, 4 along either side."""
        taps, weights = buffers["taps"], buffers["weights"]
        cells = (taps[:, 0, :, None] * self.side + taps[:, 1, None, :]).flatten(1)
        products = (weights[:, 0, :, None] * weights[:, 1, None, :]).flatten(1)
        return kernels.add_taps(x, self.table, cells, products)


INTERPOLATION = np.dtype([("tap", np.int32, 4), ("weight", np.float32, 4)])


def interpolation(size: int, side: int) -> npt.NDArray[np.void]:
    """Where `size` patches lie along a table of `side` entries: INTERPOLATION [size], cubic, pixel centres aligned.

    Keys' kernel with a = -0.75, as in torch; taps beyond the table are those at its edge.
    """
    exact = (np.arange(size) + 0.5) * side / size - 0.5
    low = np.floor(exact)
    distance = np.abs(exact - low + np.array([1, 0, -1, -2])[:, None])  # of the taps low - 1, ..., low + 2
    a = -0.75
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    found = np.empty(size, INTERPOLATION)
    found["tap"] = np.clip(low[:, None] + np.arange(-1, 3), 0, side - 1)
    found["weight"] = np.where(distance <= 1, near, far).T
    return found
