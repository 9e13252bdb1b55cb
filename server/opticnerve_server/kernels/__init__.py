"""What a tower does between its matrix products and its attention, each in one pass over memory.

Every function has two implementations of one contract: `plain`, in torch, which runs everywhere and says the contract,
and `fused`, in Triton. One switch of the process says which of them CUDA tensors get; others always get the plain one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch

from . import plain

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

NAMES = ("auto", "triton", "torch")
"""Values of the switch."""

_on_cuda: ModuleType = plain


class KernelsError(ValueError):
    """The kernels asked for cannot run here. The text says why and what can."""


def choose(name: str, device: torch.device) -> str:
    """Set the switch: "triton", "torch", or "auto" for Triton where it runs. Returns the reason for the choice.

    Call it before a tower is built: what is captured afterwards keeps the kernels of its time. Raises KernelsError for
    an unknown name, and where "triton" was asked for and cannot run.
    """
    global _on_cuda
    if name not in NAMES:
        raise KernelsError(f"unknown kernels {name!r}: use {', '.join(NAMES)}")
    obstacle = "asked for by name" if name == "torch" else _obstacle(device)
    if name == "triton" and obstacle:
        raise KernelsError(f"kernels = triton cannot run here: {obstacle}; use auto or torch")
    if not obstacle:
        from . import fused

        _on_cuda = fused
        return "asked for by name" if name == "triton" else "Triton compiles here"
    if device.type == "cuda":
        _on_cuda = plain
    if name == "auto" and device.type == "cuda":
        log.warning("fused kernels cannot run, the tower is slower", extra={"reason": obstacle})
    return obstacle


def chosen(device: torch.device) -> str:
    """What tensors of this device get: "triton" or "torch"."""
    return "torch" if device.type != "cuda" or _on_cuda is plain else "triton"


def _obstacle(device: torch.device) -> str:
    """Why Triton cannot run; empty when it can. It needs its package, a C compiler and a directory to write to."""
    if device.type != "cuda":
        return f"Triton needs a CUDA device, this is {device.type}"
    try:
        from . import fused

        fused.gated(torch.zeros(1, 32, device=device), 16)
        torch.cuda.synchronize(device)
    except Exception as error:  # whatever keeps it from compiling, the plain kernels run
        return f"Triton does not compile: {type(error).__name__}: {error}"
    return ""


def _switched(reference: Callable[P, R]) -> Callable[P, R]:
    """`reference`, or for CUDA tensors what was chosen in its place; the first argument is a tensor."""

    @functools.wraps(reference)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        first: Any = arguments[0]
        if not first.is_cuda:
            return reference(*arguments, **named)
        result: R = getattr(_on_cuda, reference.__name__)(*arguments, **named)
        return result

    return call


layer_norm = _switched(plain.layer_norm)
rms_norm = _switched(plain.rms_norm)
rotate_ = _switched(plain.rotate_)
gated = _switched(plain.gated)
quick_gelu = _switched(plain.quick_gelu)
gelu_linear = _switched(plain.gelu_linear)
patches = _switched(plain.patches)
clear_tail_ = _switched(plain.clear_tail_)
add_taps = _switched(plain.add_taps)
gather = _switched(plain.gather)
