"""What a bug report should say: versions, devices, limits and settings. No secrets: of their files only the names."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from . import __version__
from .config import cores

_PACKAGES = (
    "torch",
    "triton",
    "grpcio",
    "protobuf",
    "numpy",
    "pillow",
    "av",
    "msgspec",
    "prometheus-client",
    "opentelemetry-sdk",
)
_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory.current", "cpu.max", "pids.max")
_DRIVER_TIMEOUT_S = 10.0


def collect_env(settings: Mapping[str, str]) -> dict[str, object]:
    """Everything, JSON. `settings` are the effective ones as text. Imports torch; takes seconds."""
    return {
        "opticnerve": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cores": {"usable": cores(), "machine": os.cpu_count()},
        "cgroup": {name: _first_line(_CGROUP / name) for name in _LIMITS},
        "shared_memory_bytes": shutil.disk_usage("/dev/shm").total,  # noqa: S108
        "driver": _driver(),
        "devices": _devices(),
        "settings": dict(settings),
    }


def as_text(report: Mapping[str, object], indent: str = "") -> str:
    """The report for people, a value a line."""
    lines = []
    for name, value in report.items():
        nested = isinstance(value, dict)
        lines.append(f"{indent}{name}:" if nested else f"{indent}{name}: {value}")
        if isinstance(value, dict):
            lines.append(as_text(value, indent + "  "))
    return "\n".join(line for line in lines if line)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(path: Path) -> str | None:
    """None where there is no such limit: another kind of cgroup, or the root of all."""
    try:
        return path.read_text(encoding="ascii").split("\n")[0]
    except OSError:
        return None


def _driver() -> str | None:
    """The version of NVIDIA's driver; None without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {type(error).__name__}"
    return done.stdout.split("\n")[0]


def _devices() -> list[dict[str, object]]:
    """What torch sees."""
    import torch

    found: list[dict[str, object]] = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        capability = f"{device.major}.{device.minor}"
        found.append({"name": device.name, "memory_bytes": device.total_memory, "capability": capability})
    return found
