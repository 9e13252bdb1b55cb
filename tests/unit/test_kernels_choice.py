"""The switch between the two implementations of the kernels, on a machine without Triton."""

from __future__ import annotations

import sys

import pytest
import torch

from opticnerve_server import kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its import failed, also where it is installed; the switch is left as it was."""
    monkeypatch.setitem(sys.modules, "opticnerve_server.kernels.fused", None)
    monkeypatch.delattr(kernels, "fused", raising=False)
    monkeypatch.setattr(kernels, "_on_cuda", kernels.plain)


def test_auto_goes_on_without_triton_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    assert "CUDA" in kernels.choose("auto", CPU)
    assert not caplog.records
    assert "does not compile" in kernels.choose("auto", CUDA)
    assert kernels.chosen(CUDA) == "torch"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_triton_by_name_is_refused_where_it_cannot_run() -> None:
    for device, why in ((CPU, "needs a CUDA device, this is cpu"), (CUDA, "does not compile")):
        with pytest.raises(kernels.KernelsError, match=rf"triton cannot run here: .*{why}.*use auto or torch"):
            kernels.choose("triton", device)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(kernels.KernelsError, match=r"unknown kernels 'cuda': use auto, triton, torch"):
        kernels.choose("cuda", CPU)
    assert kernels.choose("torch", CPU) == "asked for by name"
