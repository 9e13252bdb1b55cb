"""The rows of an embedding: values, views, shared memory."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from fake_service import answer
from opticnerve import Embedding
from opticnerve.chunks import unpack
from opticnerve.tensors import Receiver

ROWS = np.random.default_rng(3).standard_normal((6, 12)).astype(np.float32)


def receive(rows: np.ndarray[Any, Any], dtype: str, **layout: int) -> Embedding:
    receiver = Receiver([0], dtype)
    messages = (unpack(message.SerializeToString()) for message in answer(0, rows, **layout))
    *_, (index, embedding) = filter(None, map(receiver.receive, messages))
    receiver.close()
    assert index == 0
    assert isinstance(embedding, Embedding)
    return embedding


def test_bfloat16_rows_are_the_upper_halves_of_float32() -> None:
    exact = np.float32([[0.5, -3.0, 2.0**-120, 2.0**100]])
    embedding = receive(exact.astype(ml_dtypes.bfloat16), "bfloat16")
    expected = [struct.unpack("<I", struct.pack("<f", number))[0] >> 16 for number in exact[0]]
    assert embedding.array.view(np.uint16).tolist() == [expected]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_torch_shares_the_memory_of_the_array(dtype: str) -> None:
    rows = torch.from_numpy(ROWS).to(getattr(torch, dtype))
    embedding = receive(ROWS.astype(embedding_dtype(dtype)), dtype)
    tensor = embedding.torch()
    assert tensor.dtype == getattr(torch, dtype)
    assert torch.equal(tensor, rows)
    assert tensor.data_ptr() == embedding.array.ctypes.data
    tensor[2, 5] = 42
    assert embedding.array[2, 5] == 42


def embedding_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def test_levels_are_views_in_ascending_order() -> None:
    embedding = receive(ROWS, "float32", deepstack_levels=3)
    assert (embedding.hidden, embedding.width, embedding.tokens) == (3, 12, 6)
    levels = [embedding.main, *embedding.deepstack]
    np.testing.assert_array_equal(np.concatenate(levels, axis=1), ROWS)
    assert all(np.shares_memory(level, embedding.array) for level in levels)


def test_a_tower_without_deepstack_has_no_further_levels() -> None:
    embedding = receive(ROWS, "float32")
    assert embedding.deepstack == []
    np.testing.assert_array_equal(embedding.main, ROWS)


def test_the_outcome_is_a_hit_only_when_every_path_hit() -> None:
    embedding = receive(ROWS, "float32")
    [hit] = embedding.dispatches
    miss = replace(hit, outcome="eager", budget=0)
    assert (hit.path, hit.outcome, hit.budget, hit.batch_items, hit.batch_units) == ("default", "replay", 64, 2, 12)
    assert embedding.outcome == "replay"
    assert replace(embedding, dispatches=(hit, miss)).outcome == "eager"
    assert replace(embedding, dispatches=(), store_hit=True).outcome == "store"
