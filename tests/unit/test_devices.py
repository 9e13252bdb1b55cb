"""Which devices a server drives, and what an engine sees of them."""

from __future__ import annotations

import os

import pytest

from opticnerve_server import devices
from opticnerve_server.config import Config, load
from opticnerve_server.devices import VISIBLE, devices_of, show_only
from opticnerve_server.settings import ConfigError


@pytest.mark.parametrize(
    ("gpus", "device", "wanted", "expected"),
    [
        (8, "auto", "all", list(range(8))),
        (8, "cpu", "all", [0]),
        (0, "auto", "all", [0]),
        (2, "cuda", "1", [1]),
        (0, "cpu", "0,1,2", [0, 1, 2]),
        (8, "cuda", "7,0", [7, 0]),
    ],
)
def test_devices(monkeypatch: pytest.MonkeyPatch, gpus: int, device: str, wanted: str, expected: list[int]) -> None:
    monkeypatch.setattr(devices, "gpu_count", lambda: gpus)
    assert list(devices_of(Config(model="x", device=device, devices=wanted))) == expected


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_count", lambda: 2)
    with pytest.raises(ConfigError, match="devices names 2, but the 2 GPUs here are 0 to 1: drop it"):
        devices_of(Config(model="x", devices="0,2"))


@pytest.mark.parametrize("text", ["", "0,", "0,0", "0,00", "-1", "all,0", "first", "1000", "\u0663"])
def test_a_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write all, or the numbers of devices"):
        load({"model": "x", "devices": text}, {})


@pytest.mark.parametrize(
    ("listed", "device", "shown"), [(None, 3, "3"), ("4,6", 1, "6"), ("GPU-a,GPU-b", 0, "GPU-a"), ("", 0, "")]
)
def test_an_engine_sees_its_own_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, listed: str | None, device: int, shown: str
) -> None:
    environ = {} if listed is None else {VISIBLE: listed}
    monkeypatch.setattr(os, "environ", environ)
    show_only(device)
    assert environ[VISIBLE] == shown


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(devices.ctypes, "CDLL", missing)
    assert devices.gpu_count() == 0
