"""The example gateway in front of a whole vLLM: a photograph in an OpenAI request. The last test kills the service."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from running_server import eventually
from whole_vllm import PHOTOGRAPH, ROOT, Alone, HttpError, Pair, Upstream, WholeVllm, free_port, pixels

IMAGE = pixels(PHOTOGRAPH.read_bytes(), "jpeg")


@pytest.fixture(scope="module")
def gateway(pair: Pair, vllm: WholeVllm) -> Iterator[Upstream]:
    address = f"127.0.0.1:{free_port()}"
    program = [sys.executable, str(ROOT / "deploy" / "examples" / "gateway.py")]
    flags = ["--service", pair.service.address, "--upstream", f"http://{vllm.address}", "--listen", address]
    process = subprocess.Popen([*program, *flags], stderr=subprocess.DEVNULL)
    front = Upstream(address)
    try:
        eventually(front.answers)
        yield front
    finally:
        process.terminate()
        process.wait()


def test_a_photograph(pair: Pair, alone: Alone, gateway: Upstream) -> None:
    before = pair.calls()
    assert gateway.chat([IMAGE]).tokens == alone.photograph.tokens
    assert pair.calls() - before == 2  # the gateway's, which leaves the rows there, and the decoder's
    assert gateway.chat([IMAGE]).tokens == alone.photograph.tokens
    assert pair.calls() - before == 3


def test_a_picture_that_is_none(gateway: Upstream) -> None:
    with pytest.raises(HttpError) as caught:
        gateway.chat([pixels(b"no picture")])
    assert caught.value.status == 400


def test_the_service_is_killed(pair: Pair, alone: Alone, vllm: WholeVllm, gateway: Upstream) -> None:
    kept, lost = pair.by_reference([0]), pair.by_reference([4])
    expected = vllm.chat(**kept)
    pair.service.process.kill()
    pair.service.process.wait()
    with pytest.raises(HttpError) as caught:
        gateway.chat([IMAGE])
    assert caught.value.status == 503
    assert "encoder" in json.loads(caught.value.body)["error"]["message"]
    with pytest.raises(HttpError) as caught:
        vllm.chat(**lost)
    assert caught.value.status == 500
    assert vllm.chat(**kept) == expected  # its rows are still there
    assert vllm.chat([IMAGE]).tokens == alone.photograph.tokens
    assert gateway.chat([]).tokens == vllm.chat([]).tokens
