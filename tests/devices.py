"""Where a test runs: on the CPU, and again on CUDA where there is such a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

CUDA = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
"""Marks of what needs one."""


def on_cuda(*values: Any) -> Any:
    """Parameters of a test, "cuda" being the first."""
    return pytest.param("cuda", *values, marks=CUDA)
