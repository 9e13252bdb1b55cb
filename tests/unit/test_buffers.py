"""Host blocks that metadata is staged in, and the halves that rows are copied out from."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from house import House
from opticnerve_server import buffers
from opticnerve_server.buffers import ALIGNMENT, Packing, Ring, Staging
from opticnerve_server.models.base import PIXELS, BufferSpec

CPU = torch.device("cpu")


def address(tensor: torch.Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def test_metadata_of_a_used_block_holds_pad_values_and_zeros_between_them() -> None:
    specs = {
        "lengths": BufferSpec((3,), "int32"),
        "weights": BufferSpec((2, 5), "float32", pad=0.25),
        "place": BufferSpec((7,), "int32", pad=-1),
        PIXELS: BufferSpec((11,), "uint8"),
    }
    packing = Packing.of(specs)
    block = np.full(packing.meta_bytes + 9, 255, np.uint8)
    arrays = packing.metadata(block)
    assert list(arrays) == ["lengths", "weights", "place"]
    used = 0
    for name, array in arrays.items():
        assert (array.shape, array.dtype) == (specs[name].shape, np.dtype(specs[name].dtype))
        assert (array == specs[name].pad).all()
        assert (array.ctypes.data - block.ctypes.data) % ALIGNMENT == 0
        array.view(np.uint8)[...] = 7
        used += array.nbytes
    assert (block[: packing.meta_bytes] == 7).sum() == used, "arrays lie in the block, none over another"
    assert (block[: packing.meta_bytes] == 0).sum() == packing.meta_bytes - used
    assert (block[packing.meta_bytes :] == 255).all()


def test_pieces_of_one_batch_do_not_overlap_and_the_next_batch_has_the_block_again() -> None:
    staging = Staging(1024, CPU)
    for _ in range(3):
        staging.open()
        pieces = [staging.take(size) for size in (1, 300, 256)]
        assert all(piece.data_ptr() in address(staging.block) for piece in pieces)
        for one, other in itertools.pairwise(pieces):
            assert one.data_ptr() + one.nbytes <= other.data_ptr()
            assert (other.data_ptr() - staging.block.data_ptr()) % ALIGNMENT == 0


def test_what_does_not_fit_is_staged_in_memory_of_its_own() -> None:
    staging = Staging(1024, CPU)
    first, large, last = staging.take(512), staging.take(2000), staging.take(512)
    assert large.nbytes == 2000
    assert large.data_ptr() not in address(staging.block)
    assert last.data_ptr() == first.data_ptr() + 512


@pytest.mark.parametrize(("rows", "own"), [(4, False), (1, False), (5, True)])
def test_rows_and_peaks_of_a_batch_over_every_graph_have_memory_of_their_own(rows: int, own: bool) -> None:
    ring = Ring(4, 2, torch.float32, CPU)
    for given, of in ((ring.half, (rows, 2)), (ring.peaks, (rows,))):
        tensors = [given(turn, rows) for turn in (0, 1, 0)]
        assert {tensor.shape for tensor in tensors} == {of}
        assert (tensors[0].data_ptr() == tensors[2].data_ptr()) is not own
        assert tensors[0].data_ptr() != tensors[1].data_ptr()


def test_batches_of_captured_graphs_allocate_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory is slow to get, and not to be had while the device is busy."""
    house = House()
    monkeypatch.setattr(buffers.Staging, "_allocate", None)
    monkeypatch.setattr(buffers.Ring, "_host", None)
    for height, width in [(32, 32), (4, 256), *[(8, 16)] * 8, (4, 4)]:  # the largest on one path and on both, the most
        house.submit(height, width)
    house.run_all()
    for call in range(house.calls):
        house.check(call)
