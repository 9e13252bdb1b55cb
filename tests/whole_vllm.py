"""A whole vLLM on a CPU, as its users run it: a process, spoken to by HTTP."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

import opticnerve
from opticnerve.integrations.vllm import Encoder
from running_server import RunningServer
from vllm_models import PATCH

START_S = 600.0
ANSWER_S = 120.0
ROOT = Path(__file__).parents[1]
PHOTOGRAPH = ROOT / "deploy" / "demo" / "astronaut.jpg"


@dataclass(frozen=True)
class Answer:
    """What it said: the tokens, and the log-probability of each; to which prompt."""

    tokens: list[int]
    logprobs: list[float]
    prompt: list[int]


class HttpError(Exception):
    """A status that is not 200."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body


class Upstream:
    """Anything that speaks OpenAI's chat completions at an address."""

    def __init__(self, address: str) -> None:
        self.address = address

    def chat(self, parts: Sequence[dict[str, Any]], **body: Any) -> Answer:
        """12 tokens, greedy, after a prompt of these content parts. Raises HttpError."""
        content = [{"type": "text", "text": "hello"}, *parts, {"type": "text", "text": "what is it?"}]
        request = {
            "model": "tiny",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": True,
            "return_token_ids": True,
            **body,
        }
        answer = self.post("/v1/chat/completions", request)
        choice = answer["choices"][0]
        logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
        return Answer(choice["token_ids"], logprobs, answer["prompt_token_ids"])

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://{self.address}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise HttpError(error.code, error.read().decode()) from None

    def answers(self) -> bool:
        """Whether it serves."""
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


class WholeVllm(Upstream):
    """Its log lies in `log`."""

    def __init__(self, python: Path, model: Path, log: Path, *flags: str) -> None:
        super().__init__(f"127.0.0.1:{free_port()}")
        self.log = log
        host, _, port = self.address.partition(":")
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "tiny"]
        command += ["--host", host, "--port", port, "--enforce-eager", "--max-model-len", "1024", "--dtype", "float32"]
        command += ["--max-num-seqs", "8", "--no-enable-prefix-caching", *flags]
        variables = {"PYTHONPATH": str(ROOT / "client"), "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                list(map(str, command)), env=os.environ | variables, stdout=file, stderr=subprocess.STDOUT
            )

    def wait_until_ready(self) -> None:
        until = time.monotonic() + START_S
        while not self.answers():
            assert self.process.poll() is None, self.log.read_text()[-1000:]
            assert time.monotonic() < until, self.log.read_text()[-1000:]
            time.sleep(0.5)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def whole_vllm(python: Path, model: Path, log: Path, *flags: str) -> Iterator[WholeVllm]:
    """One from ready to stopped."""
    vllm = WholeVllm(python, model, log, *flags)
    try:
        vllm.wait_until_ready()
        yield vllm
    finally:
        vllm.stop()


def connector_flags(server: str, **extra: Any) -> tuple[str, str]:
    """What makes a vLLM fetch from a service."""
    config = {
        "ec_connector": "OpticnerveECConnector",
        "ec_role": "ec_consumer",
        "ec_connector_module_path": "opticnerve.integrations.vllm.connector",
        "ec_connector_extra_config": {"server": server, **extra},
    }
    return "--ec-transfer-config", json.dumps(config)


def pixels(file: bytes, kind: str = "png") -> dict[str, Any]:
    """The content part that carries an image file."""
    url = f"data:image/{kind};base64,{base64.b64encode(file).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


SERVICE = ("--token-budgets", "64,256", "--dtype", "float32", "--store-bytes", str(64 << 20))
SIZES = ((4, 5), (6, 3), (6, 3), (9, 9), (2, 2), (3, 7))
"""Height and width in tokens: none that a processor resizes."""

PROMPTS = ([0], [0, 1], [0, 2], [3, 1, 0], [1, 1])
"""Which images each prompt has."""


def image_files(architecture: str) -> list[bytes]:
    side = 2 * PATCH[architecture]
    files = []
    for seed, (height, width) in enumerate(SIZES):
        array = np.random.default_rng(seed).integers(0, 256, (height * side, width * side, 3), dtype=np.uint8)
        files.append(png(array))
    return files


RATE = 4.0
"""Frames of a video in a second."""


def video_frames(architecture: str) -> npt.NDArray[np.uint8]:
    """Six frames of 4 x 5 tokens."""
    side = 2 * PATCH[architecture]
    return np.random.default_rng(5).integers(0, 256, (6, 4 * side, 5 * side, 3), dtype=np.uint8)


def video_pixels(architecture: str) -> dict[str, Any]:
    """What `chat` takes to send them to vLLM: its list of JPEG frames, which takes PNG as well."""
    files = [base64.b64encode(png(frame)).decode() for frame in video_frames(architecture)]
    part = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{','.join(files)}"}}
    return {"parts": [part], "media_io_kwargs": {"video": {"fps": RATE, "num_frames": -1}}}


def png(array: npt.NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


@dataclass(frozen=True)
class Pair:
    """A service and the model of its decoder."""

    architecture: str
    model: Path
    service: RunningServer
    client: opticnerve.Client
    encoder: Encoder
    files: list[bytes]

    def inline(self, images: list[int]) -> list[dict[str, Any]]:
        files = [self.files[index] for index in images]
        return [self.encoder.inline(embedding) for embedding in self.client.encode(files, dtype="float32")]

    def by_reference(self, images: list[int]) -> dict[str, Any]:
        """Content parts and `ec_transfer_params`, as arguments of `chat`."""
        held = self.client.hold([self.files[index] for index in images], ttl=60, dtype="float32")
        parts = [self.encoder.by_reference(item, dtype="float32") for item in held]
        return {"parts": parts, "ec_transfer_params": self.encoder.transfer_params(parts, held)}

    def calls(self) -> int:
        """Calls of Encode that have ended: the tests' own and the decoder's."""
        return int(self.service.total("opticnerve_request_duration_seconds_count", method="Encode"))


@dataclass(frozen=True)
class Alone:
    """What a vLLM says that knows nothing of the service, by prompt: from pixels, and from rows in the request."""

    pixels: list[Answer]
    inline: list[Answer]
    photograph: Answer
    video: Answer
