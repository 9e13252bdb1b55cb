"""The gateway of deploy/examples between a scripted service and a scripted vLLM."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import numpy as np
import pytest
import yaml

import opticnerve
from fake_service import Abort, FakeService, failed, finished, rows_of, serving, started
from opticnerve.integrations.vllm import Reference
from opticnerve.integrations.vllm.settings import Settings
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve_server.config import Config
from opticnerve_server.settings import flag, settings_of

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
INFO = pb.GetServerInfoResponse(architecture="qwen2_5_vl", fingerprint="fp", layout=pb.Layout(hidden=8))
DIGEST = bytes(range(32))
UUID = Reference.of(DIGEST, "fp", "bfloat16").uuid
PIECES = [b"data: 1\n\n", b"data: 2\n\n"]


def load_gateway() -> Any:
    spec = importlib.util.spec_from_file_location("gateway", EXAMPLES / "gateway.py")
    assert spec
    assert spec.loader
    module = sys.modules["gateway"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GATEWAY = load_gateway()


class FakeVllm(BaseHTTPRequestHandler):
    """Keeps what it is sent; answers a stream in pieces."""

    requests: list[tuple[str, dict[str, str], bytes]]

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length", "0")))
        self.server.requests.append((self.path, dict(self.headers), data))  # type: ignore[attr-defined]
        self.send_response(418 if b"teapot" in data else 200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for piece in PIECES:
            self.wfile.write(piece)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        pass


def hold_all(request: pb.EncodeRequest) -> list[pb.EncodeResponse]:
    """Every item is planned, and stays here."""
    assert request.delivery.HasField("hold")
    messages = []
    for position in range(len(request.items)):
        begin = started(position, rows_of(request.items[position]))
        begin.started.lease_expiry.FromSeconds(60)
        begin.started.address = "10.0.0.1:50051"
        messages += [begin, finished(position, np.empty((0, 8), np.float32))]
    return messages


class House:
    """A gateway, what is behind it, and a caller."""

    def __init__(self, address: str, service: FakeService) -> None:
        self.service = service
        self.vllm: Any = ThreadingHTTPServer(("127.0.0.1", 0), FakeVllm)
        self.vllm.requests = []
        self.client = opticnerve.Client(address, timeout=2, wait_until_ready=False)
        upstream = f"http://127.0.0.1:{self.vllm.server_port}"
        self.gateway: Any = GATEWAY.Gateway(("127.0.0.1", 0), self.client, upstream)
        self._threads = [Thread(target=one.serve_forever, args=[0.01]) for one in (self.vllm, self.gateway)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        for server in (self.gateway, self.vllm):
            server.shutdown()
            server.server_close()
        self.client.close()

    async def call(self, data: Any, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any, bytes]:
        """Status, headers and body."""
        body = data if isinstance(data, bytes | None) else json.dumps(data).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.gateway.server_port}{path}", body, headers)

        def send() -> tuple[int, Any, bytes]:
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    return answer.status, answer.headers, answer.read()
            except urllib.error.HTTPError as error:
                return error.code, error.headers, error.read()

        return await asyncio.to_thread(send)


@asynccontextmanager
async def house(*scripts: Any, info: pb.GetServerInfoResponse = INFO) -> AsyncIterator[House]:
    service = FakeService(*(scripts or [hold_all]), info=info)
    async with serving(service) as address:
        whole = await asyncio.to_thread(House, address, service)
        try:
            yield whole
        finally:
            await asyncio.to_thread(whole.close)


def image(data: bytes = b"\1picture") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def chat(*parts: Any, **body: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "system", "content": "be"}, {"role": "user", "content": list(parts)}],
        **body,
    }


async def test_images_go_to_the_service_and_references_to_vllm() -> None:
    text = {"type": "text", "text": "what?"}
    async with house() as whole:
        status, headers, body = await whole.call(
            chat(text, image(), image(b"\2other"), seed=1), authorization="Bearer key", cookie="no"
        )
        assert (status, headers["content-type"], body) == (200, "text/event-stream", b"".join(PIECES))
        [(path, passed, data)] = whole.vllm.requests
        assert [item.encoded_image.data for item in whole.service.encode_requests[0].items] == [
            b"\1picture",
            b"\2other",
        ]
    assert path == "/v1/chat/completions"
    assert passed["authorization"] == "Bearer key"
    assert "cookie" not in passed
    part = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 2, 12]}, "uuid": UUID}
    assert json.loads(data) == chat(text, part, part, seed=1, ec_transfer_params={UUID: {"address": "10.0.0.1:50051"}})


async def test_what_has_no_images_passes() -> None:
    async with house() as whole:
        assert (await whole.call(chat({"type": "text", "text": "teapot"})))[0] == 418
        assert (await whole.call(None, "/v1/models"))[0] == 200
        assert [path for path, *_ in whole.vllm.requests] == ["/v1/chat/completions", "/v1/models"]
        assert whole.service.encode_requests == []


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"\xff",
        {},
        {"messages": 7},
        chat({"type": "image_url"}),
        chat({"type": "image_url", "image_url": {"url": "http://inside/secret"}}),
        chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}),
        chat({}),
    ],
)
async def test_bad_requests(body: Any) -> None:
    async with house() as whole:
        status, _, answer = await whole.call(body)
        assert status == 400
        assert json.loads(answer)["error"]["code"] == 400
        assert whole.vllm.requests == []


@pytest.mark.parametrize(
    ("code", "reason", "status"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_INVALID", 400),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "STORE_FULL", 503),
        (grpc.StatusCode.INTERNAL, "INTERNAL", 503),
    ],
)
async def test_refusals_of_the_service(code: grpc.StatusCode, reason: str, status: int) -> None:
    async with house(lambda _: [failed(0, code, reason, retry_after=2.5)]) as whole:
        found, headers, body = await whole.call(chat(image()))
        assert found == status
        assert headers["retry-after"] == (None if status == 400 else "3")
        assert reason in json.loads(body)["error"]["message"]
        assert whole.vllm.requests == []


async def test_a_service_of_which_vllm_takes_no_rows() -> None:
    async with house(info=pb.GetServerInfoResponse(architecture="gemma3")) as whole:
        assert (await whole.call(chat(image())))[0] == 503


async def test_nobody_there() -> None:
    async with house(lambda _: [Abort(grpc.StatusCode.UNAVAILABLE)]) as whole:
        status, headers, body = await whole.call(chat(image()))
        assert (status, headers["retry-after"]) == (503, "1")
        assert "encoder" in json.loads(body)["error"]["message"]
        await asyncio.to_thread(whole.vllm.shutdown)
        whole.vllm.server_close()
        status, _, body = await whole.call(chat("text"))
        assert status == 400
        status, _, body = await whole.call(chat({"type": "text", "text": "hi"}))
        assert status == 503
        assert "vLLM" in json.loads(body)["error"]["message"]


async def test_a_body_that_is_too_large() -> None:
    async with house() as whole:
        reader, writer = await asyncio.open_connection("127.0.0.1", whole.gateway.server_port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
        assert b" 413 " in await reader.readline()
        writer.close()


def test_the_compose_file_says_what_each_program_takes() -> None:
    services = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]
    verb, *flags = services["encoder"]["command"]
    assert verb == "serve"
    assert set(flags[::2]) <= {flag(name) for name in settings_of(Config)}
    transfer = json.loads(services["vllm"]["command"][-1])
    assert Settings.of(transfer["ec_connector_extra_config"]).address_of(flags[flags.index("--advertise") + 1])
    assert (transfer["ec_connector"], transfer["ec_role"]) == ("OpticnerveECConnector", "ec_consumer")
    assert importlib.util.find_spec(transfer["ec_connector_module_path"])
    [volume] = services["gateway"]["volumes"]
    assert (EXAMPLES / volume.split(":")[0]).is_file()
    assert services["gateway"]["entrypoint"][1] == volume.split(":")[1]
