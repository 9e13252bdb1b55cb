"""The package: its public names, what it imports, the one place that configures gRPC."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import opticnerve
from opticnerve import channel

PACKAGE = Path(opticnerve.__file__).parent
ROOT = Path(__file__).parents[2]


def test_public_names_are_pinned() -> None:
    assert opticnerve.__all__ == [
        "AsyncClient",
        "Client",
        "Digest",
        "Dispatch",
        "Embedding",
        "FileSource",
        "Frames",
        "Grid",
        "Held",
        "ImageSource",
        "ItemPlan",
        "MediaSource",
        "OpticnerveError",
        "Patches",
        "ProtocolError",
        "ServerError",
        "SizeSource",
        "Span",
        "Timings",
        "Tls",
        "Video",
        "VideoSize",
        "digest",
    ]
    submodules = {path.stem for path in PACKAGE.iterdir()}
    public = {name for name in vars(opticnerve) if not name.startswith("_")} - submodules
    assert public == set(opticnerve.__all__)


def test_importing_the_client_and_its_cli_is_light() -> None:
    code = "import sys, opticnerve, opticnerve.cli; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = {name.partition(".")[0] for name in run.stdout.split()}
    assert {"opticnerve", "grpc", "numpy"} <= modules
    assert not modules & {"torch", "PIL", "opticnerve_server", "transformers", "msgspec", "prometheus_client"}


def test_using_numpy_images_imports_nothing_more() -> None:
    code = (
        "import sys, numpy, opticnerve.media as media; image = numpy.zeros((2, 2, 3), 'uint8'); "
        "media.to_items([image, b'x', media.Frames([image], 1), media.Patches({'pixel_values': image})]); "
        "assert not {'torch', 'PIL'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_the_channel_configures_grpc() -> None:
    importers, spellers = set(), set()
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(name.split(".")[0] in ("grpc", "grpc_health", "grpc_status") for name in names):
                importers.add(path.name)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("grpc."):
                spellers.add(path.name)
    assert importers == {"channel.py", "client.py", "target.py"}  # the others catch grpc.aio.AioRpcError
    assert spellers == {"channel.py"}


def test_the_shipped_service_config_is_the_published_one() -> None:
    published = json.loads((ROOT / "deploy" / "grpc" / "service-config.json").read_text())
    assert published == channel.SERVICE_CONFIG


def test_options_are_spelt_as_grpc_knows_them() -> None:
    assert dict(channel.CHANNEL_OPTIONS) == {
        "grpc.keepalive_time_ms": 60000,
        "grpc.keepalive_timeout_ms": 20000,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.per_rpc_retry_buffer_size": 33554432,
    }
