"""An OpenAI-compatible gateway: images go to Opticnerve, the rest of a request to vLLM, with uuids in their place.

    python gateway.py --service encoder:50051 --upstream http://vllm:8000 --listen 0.0.0.0:8080

vLLM runs with OpticnerveECConnector and never sees a pixel. Images are `image_url` parts with `data:` URLs. Others are
refused: a gateway that fetches what callers name reaches where they cannot. It needs the client, and no more.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import math
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import opticnerve
from opticnerve.errors import InvalidArgumentError, OpticnerveError
from opticnerve.integrations.vllm import Encoder

MAX_BODY_BYTES = 64 << 20
SERVICE_TIMEOUT_S = 10.0
UPSTREAM_TIMEOUT_S = 600.0  # without a byte of the answer
PASSED = ("authorization", "content-type", "x-request-id")  # headers
LEASE_S = 120.0  # a request may wait in vLLM for so long before its rows are fetched


@dataclass
class Refusal(Exception):
    """An answer that is an error."""

    status: HTTPStatus
    message: str
    retry_after: float = 0.0  # seconds; 0 for never


def image_of(part: dict[str, Any]) -> bytes:
    """The file in an image_url part. Raises Refusal, and ValueError for what is no base64."""
    head, _, data = part["image_url"]["url"].partition(",")
    if not head.startswith("data:") or not head.endswith(";base64"):
        raise Refusal(HTTPStatus.BAD_REQUEST, "an image_url must be a data: URL in base64")
    return base64.b64decode(data, validate=True)


def replace_images(body: dict[str, Any], service: opticnerve.Client) -> None:
    """Lets the service encode the images of a chat request and puts references in their place. Raises Refusal."""
    contents = [message["content"] for message in body["messages"] if isinstance(message.get("content"), list)]
    images = [part for content in contents for part in content if part["type"] == "image_url"]
    if not images:
        return
    files = [image_of(part) for part in images]
    try:
        encoder = Encoder.of(service.info(timeout=SERVICE_TIMEOUT_S))
        held = service.hold(files, ttl=LEASE_S)
        references = [encoder.by_reference(item) for item in held]
    except InvalidArgumentError as error:
        raise Refusal(HTTPStatus.BAD_REQUEST, str(error)) from error
    except (OpticnerveError, ValueError) as error:
        retry_after = getattr(error, "retry_after", None) or 1.0
        raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, f"the encoder: {error}", retry_after) from error
    body["ec_transfer_params"] = encoder.transfer_params(references, held)
    for part, reference in zip(images, references, strict=True):
        part.clear()
        part.update(reference)


class Handler(BaseHTTPRequestHandler):
    """One request of a caller, in a thread of its own."""

    protocol_version = "HTTP/1.1"
    server: Gateway

    def do_POST(self) -> None:
        try:
            self.forward(self.read_body())
        except Refusal as refusal:
            self.refuse(refusal)

    do_GET = do_POST

    def read_body(self) -> bytes:
        """What vLLM is sent. Raises Refusal."""
        length = self.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"content-length must be at most {MAX_BODY_BYTES}")
        data = self.rfile.read(int(length))
        if self.path != "/v1/chat/completions":
            return data
        try:
            body = json.loads(data)
            replace_images(body, self.server.service)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Refusal(HTTPStatus.BAD_REQUEST, f"the body is no chat request: {error!r}") from error
        return json.dumps(body).encode()

    def forward(self, data: bytes) -> None:
        """Passes the answer on as it arrives: streams stay streams. Raises Refusal."""
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=UPSTREAM_TIMEOUT_S)
        headers = {name: self.headers[name] for name in PASSED if name in self.headers}
        with closing(upstream):
            try:
                upstream.request(self.command, self.path, data, headers)
                answer = upstream.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, f"vLLM: {error}", 1.0) from error
            self.begin(answer.status, {"content-type": answer.getheader("content-type", "application/json")})
            while piece := answer.read1(64 << 10):
                self.wfile.write(piece)

    def refuse(self, refusal: Refusal) -> None:
        retry = {"retry-after": str(math.ceil(refusal.retry_after))} if refusal.retry_after else {}
        self.begin(refusal.status, {"content-type": "application/json", **retry})
        error = {"message": refusal.message, "type": refusal.status.phrase, "code": refusal.status.value}
        self.wfile.write(json.dumps({"error": error}).encode())

    def begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "connection": "close"}.items():  # the end of a body is that of its connection
            self.send_header(name, value)
        self.end_headers()


class Gateway(ThreadingHTTPServer):
    """A thread a connection, however many: what limits connections belongs in front of it."""

    def __init__(self, listen: tuple[str, int], service: opticnerve.Client, upstream: str) -> None:
        self.service = service
        self.upstream = urlsplit(upstream).netloc
        super().__init__(listen, Handler)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--service", required=True, help="gRPC target of Opticnerve")
    parser.add_argument("--upstream", required=True, help="http://HOST:PORT of vLLM")
    parser.add_argument("--listen", default="127.0.0.1:8080", help="HOST:PORT")
    options = parser.parse_args()
    host, _, port = options.listen.rpartition(":")
    with opticnerve.Client(options.service, timeout=SERVICE_TIMEOUT_S, wait_until_ready=False) as service:
        Gateway((host, int(port)), service, options.upstream).serve_forever()


if __name__ == "__main__":
    main()
