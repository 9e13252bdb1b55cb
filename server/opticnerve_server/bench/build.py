"""The tower that a bench measures, with dummy weights, and the flags that say which."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from .. import kernels
from ..attention import AttentionError
from ..config import CPU_TOKEN_CAP, GPU_TOKEN_CAP
from ..graphs import GraphManager, plan_capacities
from ..models import registry
from ..models.base import Tower
from ..models.registry import ModelSource
from ..models.weights import DummyTensors
from ..settings import ConfigError
from ..types import Capacity, Load
from .recorder import Heard


class RecordingTensors(DummyTensors):
    """Dummy weights that are kept by name, for the reference."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.taken: dict[str, torch.Tensor] = {}

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """See `TensorSource.take`."""
        self.taken[name] = super().take(name, *shape)
        return self.taken[name]


@dataclass(frozen=True, slots=True)
class Built:
    """A tower and what it was made of."""

    tower: Tower
    attention: Heard
    tensors: RecordingTensors
    source: ModelSource

    @property
    def about(self) -> dict[str, str]:
        """What a table must say of where it was made."""
        device = self.tower.device
        return {
            "model": self.source.name,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "dtype": str(self.tower.dtype).removeprefix("torch."),
            "attention": self.attention.name,
            "kernels": kernels.chosen(device),
        }


def add_flags(parser: argparse.ArgumentParser, model: str) -> None:
    """`model` is the default of --model."""
    parser.add_argument("--model", default=model, help=f"preset:NAME or a directory with config.json. Default {model}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--kernels", default="auto", choices=kernels.NAMES)


def build(options: argparse.Namespace, backend: str | None = None) -> Built:
    """The tower of `add_flags`' options, or with another backend. Raises ModelError and ConfigError."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    source = registry.open_model(options.model, "dummy")
    planner = registry.build_planner(source)
    tensors = RecordingTensors(device, dtype)
    cls = registry.tower_class(source.architecture)
    config = cls.read_config(source.config)
    try:
        name = backend or options.attention_backend
        attention, why = registry.choose_attention(name, source.architecture, device, dtype, config.head_dim)
        print(f"attention: {attention.name}, {why}")
        why = kernels.choose(options.kernels, device)
        print(f"kernels: {kernels.chosen(device)}, {why}")
    except (AttentionError, kernels.KernelsError) as error:
        raise ConfigError(str(error)) from error
    heard = Heard(attention)
    return Built(cls(config, planner, tensors, heard), heard, tensors, source)


def tight(load: Load) -> Capacity:
    """The capacity of exactly this load: a replay of its graph computes no padding."""
    return Capacity(load.units, load.items, load.segments, load.longest)


def capture(
    built: Built, cap: int | None, explicit: dict[str, list[int]] | None = None, max_items: int | None = None
) -> tuple[GraphManager, dict[str, list[Capacity]]]:
    """Graphs of the automatic budgets up to `cap`, by default a server's, or of the `explicit` ones.

    Raises ConfigError for budgets that cannot be.
    """
    on_cuda = built.tower.device.type == "cuda"
    try:
        capacities = plan_capacities(
            built.tower.planner.paths,
            explicit=explicit or {},
            cap=cap or (GPU_TOKEN_CAP if on_cuda else CPU_TOKEN_CAP),
            max_items=max_items,
            launch=built.attention.launch,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    graphs = GraphManager(built.tower, capacities)
    graphs.estimate()  # as a server does: what its forward reserves is not the graphs'
    graphs.capture(lambda *_: None, on_failure="fail")
    return graphs, capacities
