"""Where a tower's weights come from: a checkpoint's safetensors, or random numbers of the same shapes.

A tower takes its tensors by name while it is built, so each name and shape is written once, where it is used.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from .config import ModelError

MODEL = "model."
"""What some checkpoints put before the names of all tensors, and others leave out."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

INDEX = "model.safetensors.index.json"


def stored_name(name: str, prefixes: Mapping[str, str]) -> str:
    """What a tower's tensor is called in a checkpoint, less MODEL."""
    return next(prefix + name.removeprefix(own) for prefix, own in prefixes.items() if name.startswith(own))


def own_name(stored: str, prefixes: Mapping[str, str]) -> str | None:
    """What the tower calls a tensor of a checkpoint; None if it is not the tower's. See `open_tensors`."""
    bare = stored.removeprefix(MODEL)
    return next((own + bare.removeprefix(p) for p, own in prefixes.items() if bare.startswith(p)), None)


def tower_shards(directory: Path, prefixes: Mapping[str, str]) -> list[str] | None:
    """Files that the index of a checkpoint names for the tower's tensors; None without an index. Raises ModelError."""
    index = read_index(directory)
    return None if index is None else sorted({file for name, file in index.items() if own_name(name, prefixes)})


def read_index(directory: Path) -> dict[str, str] | None:
    """The file of every tensor by its name, of a checkpoint with an index. Raises ModelError."""
    index = directory / INDEX
    if not index.is_file():
        return None
    try:
        return {str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: cannot read weight_map: {error!r}; download the file again") from error


class TensorSource(Protocol):
    """Hands out each tensor once. One thread."""

    device: torch.device
    dtype: torch.dtype

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor of this name on `device`, of `dtype`, the caller's own. Raises ModelError if there is none."""
        ...

    def skip(self, prefix: str) -> None:
        """Leave out tensors whose names begin so, if there are any: the tower has no use for them."""
        ...

    @property
    def count(self) -> int:
        """How many tensors were taken."""
        ...

    def finish(self) -> str:
        """The digest of all tensors taken, hexadecimal. Raises ModelError if the source has tensors nobody took."""
        ...


def open_tensors(
    directory: Path | None, prefixes: Mapping[str, str], *, load_format: str, device: torch.device, dtype: torch.dtype
) -> TensorSource:
    """The source for `load_format` "safetensors", which reads `directory`, or "dummy", which reads nothing.

    `prefixes` are what names of the tower's tensors begin with in a checkpoint, with or without MODEL before it, and
    what the tower itself puts in its place, nothing last. All other tensors are left alone.
    """
    if load_format == "dummy":
        return DummyTensors(device, dtype)
    if load_format != "safetensors":
        raise ModelError(f"unknown load format {load_format!r}: use safetensors or dummy")
    if directory is None:
        raise ModelError("a preset has no weights: use --load-format dummy, or --model with a checkpoint directory")
    return CheckpointTensors(directory, prefixes, device, dtype)


class CheckpointTensors:
    """The tower's tensors in the safetensors files of a directory, read one by one, straight to the device.

    With an index only the shards that it names for the tower are opened; without one, the header of every file is read.
    """

    def __init__(self, directory: Path, prefixes: Mapping[str, str], device: torch.device, dtype: torch.dtype) -> None:
        """Find the tensors; reads no weights yet. Raises ModelError."""
        self.device, self.dtype = device, dtype
        self.directory = directory
        self._prefixes = prefixes
        self._files: dict[Path, Any] = {}  # open memory maps
        self._left: dict[str, tuple[str, Path]] = {}  # by the tower's name: name in the file, file
        self._digests: dict[str, str] = {}
        for stored, path in self._list():
            name = own_name(stored, prefixes)
            if name is None:
                continue
            if name in self._left:
                raise ModelError(f"{directory}: both {self._left[name][0]} and {stored} are there; keep one of them")
            self._left[name] = (stored, path)
        if not self._left:
            raise ModelError(f"{directory}: no tensor begins with {' or '.join(prefixes)}: there is no vision tower")

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """See `TensorSource.take`. Fails by name on a missing or misshapen tensor, and on one that is not floating."""
        if name not in self._left:
            stored = stored_name(name, self._prefixes)
            raise ModelError(f"{self.directory}: tensor {stored} is missing, expected shape {list(shape)}")
        stored, path = self._left.pop(name)
        try:
            tensor: torch.Tensor = self._open(path).get_tensor(stored)
        except SafetensorError as error:
            raise ModelError(f"{path}: cannot read tensor {stored}: {error}; download the file again") from error
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{path}: tensor {stored} has shape {list(tensor.shape)}, expected {list(shape)}")
        if tensor.dtype not in FLOATS:
            raise ModelError(
                f"{path}: tensor {stored} is {tensor.dtype}, expected one of {', '.join(map(str, FLOATS))}: "
                "quantised towers are not supported, use the original checkpoint"
            )
        self._digests[name] = _digest(name, tensor)
        return tensor.to(self.device, self.dtype, copy=True)

    def skip(self, prefix: str) -> None:
        """See `TensorSource.skip`."""
        self._left = {name: where for name, where in self._left.items() if not name.startswith(prefix)}

    @property
    def count(self) -> int:
        """See `TensorSource.count`."""
        return len(self._digests)

    def finish(self) -> str:
        """See `TensorSource.finish`: SHA-256 over names, shapes, stored dtypes and bytes, in the order of the names."""
        self._files.clear()
        if self._left:
            stored, path = min(self._left.values())
            raise ModelError(
                f"{path}: tensor {stored} is not part of the tower that config.json describes"
                f" ({len(self._left)} such tensors): config.json and the weights do not belong together"
            )
        return _combine(self._digests)

    def _list(self) -> list[tuple[str, Path]]:
        """Every tensor of the checkpoint and its file."""
        index = read_index(self.directory)
        if index is not None:
            return [(name, self.directory / file) for name, file in index.items()]
        paths = sorted(self.directory.glob("*.safetensors"))
        if not paths:
            raise ModelError(f"{self.directory}: no *.safetensors file; use --load-format dummy for random weights")
        return [(name, path) for path in paths for name in list(self._open(path).keys())]

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path}: cannot open: {error}; download the file again") from error
        return self._files[path]


class DummyTensors:
    """Random tensors, generated on the device, the same for the same seed, device type and order of taking.

    Scaled so that activations neither vanish nor overflow: norms around 1, the outputs of a linear layer about as large
    as its inputs.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)
        self._origin = f"dummy {seed} {device.type} {dtype}"
        self._digests: dict[str, str] = {}

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """See `TensorSource.take`; there is a tensor of every name and shape."""
        self._digests[name] = f"{self._origin} {name} {shape}"
        noise = torch.randn(shape, generator=self._generator, device=self.device, dtype=self.dtype)
        if len(shape) > 1:
            return noise.div_(math.sqrt(math.prod(shape[1:])))
        if name.endswith(("_min", "_max")):  # bounds, which clip a few numbers in a hundred
            return noise.mul_(0.1).add_(2).mul_(-1 if name.endswith("_min") else 1)
        return noise.mul_(0.1).add_(1) if name.endswith((".weight", "_scale")) else noise.mul_(0.02)

    def skip(self, prefix: str) -> None:
        """See `TensorSource.skip`; there are none."""

    @property
    def count(self) -> int:
        """See `TensorSource.count`."""
        return len(self._digests)

    def finish(self) -> str:
        """See `TensorSource.finish`: SHA-256 of what the tensors were made from."""
        return _combine(self._digests)


def _digest(name: str, tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{name} {list(tensor.shape)} {tensor.dtype} ".encode())
    digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _combine(digests: dict[str, str]) -> str:
    return hashlib.sha256("\n".join(digests[name] for name in sorted(digests)).encode()).hexdigest()
