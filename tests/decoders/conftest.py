"""Whole decoders, each in an environment of its own: skipped where `make vllm` has not made it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import opticnerve
from opticnerve.integrations.vllm import Encoder
from running_server import running
from vllm_models import save_vllm_model
from whole_vllm import (
    PHOTOGRAPH,
    PROMPTS,
    SERVICE,
    Alone,
    Pair,
    WholeVllm,
    connector_flags,
    image_files,
    pixels,
    video_pixels,
    whole_vllm,
)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    python = Path(os.environ.get("VLLM_PYTHON", "/nowhere"))
    if not python.exists():
        pytest.skip("VLLM_PYTHON names no interpreter: run `make vllm`")
    return python


@pytest.fixture(scope="session", params=["qwen2_5_vl", "qwen3_vl"])
def pair(request: pytest.FixtureRequest, vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp(request.param)
    save_vllm_model(request.param, directory / "model")
    with (
        running(directory / "model", directory, *SERVICE) as service,
        opticnerve.Client(service.address) as client,
    ):
        files = image_files(request.param)
        yield Pair(request.param, directory / "model", service, client, Encoder.of(client.info()), files)


@pytest.fixture(scope="session")
def alone(pair: Pair, vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    log = tmp_path_factory.mktemp("alone") / "log"
    with whole_vllm(vllm_python, pair.model, log, "--enable-mm-embeds", "--trust-request-mm-kwargs") as vllm:
        return Alone(
            [vllm.chat([pixels(pair.files[index]) for index in images]) for images in PROMPTS],
            [vllm.chat(pair.inline(images)) for images in PROMPTS],
            vllm.chat([pixels(PHOTOGRAPH.read_bytes(), "jpeg")]),
            vllm.chat(**video_pixels(pair.architecture)),
        )


@pytest.fixture(scope="session")
def vllm(pair: Pair, alone: Alone, vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeVllm]:
    """One that fetches from the service, with room for the largest prompt and not for all. It starts after `alone`."""
    room = 130 * pair.encoder.width * 4
    flags = connector_flags(pair.service.address, networks=["127.0.0.0/8"], timeout_s=60, cache_bytes=room)
    with whole_vllm(vllm_python, pair.model, tmp_path_factory.mktemp("vllm") / "log", *flags) as server:
        yield server
