"""Which devices a server drives, found without torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from .config import Config
from .settings import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def devices_of(config: Config) -> Sequence[int]:
    """The numbers of the devices: GPUs as this process sees them; on a CPU just names, "all" of which is one.

    Raises ConfigError for a GPU that is not there.
    """
    there = 0 if config.device == "cpu" else gpu_count()
    if config.devices == "all":
        return range(max(1, there))
    wanted = [int(number) for number in config.devices.split(",")]
    missing = [number for number in wanted if there and number >= there]
    if missing:
        raise ConfigError(f"devices names {missing[0]}, but the {there} GPUs here are 0 to {there - 1}: drop it")
    return wanted


def gpu_count() -> int:
    """The GPUs that CUDA would let this process use; 0 where there is no driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def show_only(device: int) -> None:
    """Hide all GPUs but this one from what the process imports later: it is device 0 there."""
    listed = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = str(device) if listed is None else listed.split(",")[device]
