"""Who may import whom: the rules that keep the client light, the models free of gRPC, the supervisor free of torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOTS = (ROOT / "client", ROOT / "server")
CLIENT, SERVER = ROOTS[0] / "opticnerve", ROOTS[1] / "opticnerve_server"

GRPC_FILES = {
    SERVER / name for name in ("transport.py", "service.py", "health.py", "interceptors.py")
} | {CLIENT / "channel.py", CLIENT / "integrations" / "sglang" / "rpc.py"}  # fmt: skip
GRPC_TYPES = {CLIENT / "client.py", CLIENT / "target.py"}
"""May name gRPC's types, not configure it."""

SUPERVISOR = (
    "cli",
    "settings",
    "config",
    "lifecycle",
    "signals",
    "listeners",
    "processes",
    "engines",
    "frontends",
    "devices",
    "health",
    "info",
    "scrape",
    "metrics",
    "telemetry",
    "companion",
    "scheduler",
)
"""Modules of the supervisor process, and of the scheduler."""


def sources(*roots: Path) -> list[Path]:
    """Our own Python files: generated code is left out."""
    found = [path for root in roots for path in sorted(root.rglob("*.py")) if "v1" not in path.parts]
    assert found
    return found


def imports(path: Path) -> Iterator[str]:
    """Absolute names of what a file imports, relative imports resolved."""
    package = next((path.relative_to(root).parts[:-1] for root in ROOTS if path.is_relative_to(root)), ())
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def top(module: str) -> str:
    return module.split(".")[0]


def is_grpc(module: str) -> bool:
    return top(module) == "grpc" or top(module).startswith("grpc_")


def loaded_after(code: str) -> set[str]:
    """Top-level names of all modules that a clean interpreter has loaded after `code`."""
    report = code + "\nimport sys; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_the_client_loads_neither_torch_nor_pil_nor_the_server() -> None:
    heavy = {"torch", "PIL", "opticnerve_server", "transformers"}
    assert not loaded_after("import opticnerve, opticnerve.cli, opticnerve.integrations.transformers") & heavy


@pytest.mark.parametrize("path", sources(CLIENT), ids=str)
def test_the_client_never_imports_the_server(path: Path) -> None:
    assert "opticnerve_server" not in {top(module) for module in imports(path)}


@pytest.mark.parametrize("package", ["models", "attention", "kernels"])
def test_models_know_nothing_of_grpc(package: str) -> None:
    for path in sorted((SERVER / package).rglob("*.py")):
        assert not [module for module in imports(path) if is_grpc(module) or module.startswith("opticnerve.v1")], path


def test_nothing_loads_pickles() -> None:
    loaders = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
    for path in sources(CLIENT, SERVER):
        assert not {top(module) for module in imports(path)} & loaders, path


def test_models_load_no_grpc() -> None:
    code = "import opticnerve_server.models.registry, opticnerve_server.models.qwen3_vl, opticnerve_server.attention"
    assert not {name for name in loaded_after(code) if is_grpc(name)}


def test_only_the_named_files_import_grpc() -> None:
    users = {path for path in sources(CLIENT, SERVER) if any(is_grpc(module) for module in imports(path))}
    assert users - GRPC_TYPES == GRPC_FILES


def test_only_the_named_files_configure_grpc() -> None:
    for path in set(sources(CLIENT, SERVER)) - GRPC_FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        assert not [value for value in constants if isinstance(value, str) and value.startswith("grpc.")], path


def test_supervisor_and_scheduler_load_no_torch() -> None:
    modules = ", ".join(f"opticnerve_server.{name}" for name in SUPERVISOR)
    code = (
        f"import {modules}, opticnerve_server.media.decode\n"
        "from opticnerve_server.models.registry import open_model\n"
        "open_model('preset:qwen3-vl-2b', 'dummy')"
    )
    assert not loaded_after(code) & {"torch", "transformers", "aiohttp", "zmq"}


def test_tracing_is_loaded_where_it_is_asked_for_alone() -> None:
    code = (
        "import os, opticnerve_server.processes, opticnerve_server.frontend\n"
        "from opticnerve_server import tracing\n"
        "os.environ.update({environment})\n"
        "tracing.set_up('test')"
    )
    assert "opentelemetry" not in loaded_after(code.format(environment={}))
    asked = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert "opentelemetry" in loaded_after(code.format(environment=asked))


def test_front_ends_see_no_cuda_device_whatever_they_import() -> None:
    code = (
        "import os, socket, sys, types\n"
        "from opticnerve_server import processes\n"
        "assert 'torch' not in sys.modules\n"
        "def main(*arguments): print(repr(os.environ['CUDA_VISIBLE_DEVICES']), len(arguments))\n"
        "import opticnerve_server\n"
        "opticnerve_server.frontend = types.SimpleNamespace(main=main)\n"
        "processes.run_frontend(None, 0, None, None, 0, '', '', None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["''", "8"]


def test_source_roots_are_not_packages() -> None:
    for root in ROOTS:
        assert not (root / "__init__.py").exists()
    for path in sources(CLIENT, SERVER, ROOT / "tests"):
        assert not {top(module) for module in imports(path)} & {"client", "server"}, path


@pytest.mark.parametrize(
    "path", [*(SERVER / "models").glob("*.py"), SERVER / "graphs.py", SERVER / "slots.py"], ids=str
)
def test_lower_layers_do_not_import_the_request_path(path: Path) -> None:
    above = {
        "service",
        "frontend",
        "transport",
        "interceptors",
        "admission",
        "preprocess",
        "stream",
        "lifecycle",
        "cli",
    }
    assert not {module.split(".")[1] for module in imports(path) if module.startswith("opticnerve_server.")} & above
