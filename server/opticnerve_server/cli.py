"""The command line of the server: serve, check, download, make-checkpoint, soak."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from . import __version__, telemetry
from .config import Config, load
from .models.config import ModelError
from .settings import CONFIG_VARIABLE, ConfigError, Resolved, add_flags, parse_arguments, text, variable

EXIT_CONFIG = 2

BENCHES = ("tower", "ceiling", "paths", "serve", "preprocess", "hits", "balance", "scaling")
"""Modules of `bench/`."""

_EXTRA = ("torch", "PIL", "av", "grpc_reflection", "msgspec", "prometheus_client")
"""What `pip install opticnerve` leaves out."""

_SGLANG_EXTRA = ("aiohttp", "zmq", "smg_grpc_proto")
"""What the front for SGLang needs beside."""

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code. 2: a setting or a model cannot be used, the remedy is on standard error."""
    parser = _parser()
    options = parse_arguments(parser, arguments)
    try:
        code: int = options.run(options)
    except (ConfigError, ModelError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="opticnerve-server", description="The vision encoder of a VLM as a gRPC service.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"opticnerve {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = _command(commands, "serve", _serve, "serve a model until SIGTERM")
    _add_settings(serve)
    serve.add_argument("--print-config", action="store_true", help="print every setting with its source, and exit")
    check = _command(commands, "check", _check, "validate settings, model and budgets without serving")
    _add_settings(check)
    check.add_argument("--json", action="store_true", help="print JSON")
    soak = _command(commands, "soak", _soak, "try a server of its own with random calls, good and bad")
    _add_settings(soak)
    soak.add_argument("--calls", type=int, default=20_000, metavar="N", help="at most so many. Default 20000")
    soak.add_argument("--minutes", type=float, default=10.0, metavar="M", help="at most so long. Default 10")
    soak.add_argument("--concurrency", type=int, default=24, metavar="N", help="callers at a time. Default 24")
    soak.add_argument("--seed", type=int, default=0, metavar="N", help="of what is called. Default 0")
    bench = _command(commands, "bench", _bench, f"measure: {', '.join(BENCHES)}; each has its own --help")
    bench.add_argument("what", choices=BENCHES)
    bench.add_argument("arguments", nargs=argparse.REMAINDER)
    env = _command(commands, "collect-env", _collect_env, "print what a bug report should say; no secrets")
    _add_settings(env)
    env.add_argument("--json", action="store_true", help="print JSON")
    fetch = _command(commands, "download", _download, "fetch what a server reads of a model from the Hugging Face hub")
    fetch.add_argument("--repository", required=True, metavar="ORG/NAME", help="such as Qwen/Qwen3-VL-8B-Instruct")
    fetch.add_argument("--revision", required=True, metavar="COMMIT", help="a commit, so that all replicas are equal")
    fetch.add_argument("--out", required=True, type=Path, metavar="DIR", help="directory to write, which is made")
    make = _command(commands, "make-checkpoint", _make_checkpoint, "write a small checkpoint with random weights")
    make.add_argument("--arch", required=True, help="architecture, such as qwen3_vl")
    make.add_argument("--out", required=True, type=Path, metavar="DIR", help="directory to write, which is made")
    make.add_argument("--seed", type=int, default=0, metavar="N", help="of the random weights. Default 0")
    return parser


def _command(commands: argparse._SubParsersAction, name: str, run: object, help: str) -> argparse.ArgumentParser:  # type: ignore[type-arg]
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
    parser.set_defaults(run=run, parser=parser)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS, help="TOML file of settings; also OPTICNERVE_CONFIG"
    )
    add_flags(parser, Config)


def _need_extra() -> None:
    """Raise ConfigError where the client alone is installed."""
    _need(_EXTRA, "the server", "server")


def _need(modules: Sequence[str], user: str, extra: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{user} needs {', '.join(missing)}: pip install 'opticnerve[{extra}]'")


def _load(options: argparse.Namespace) -> Resolved[Config]:
    names = {"config"} | {field.name for field in fields(Config)}
    return load({name: value for name, value in vars(options).items() if name in names}, os.environ)


def _shown(resolved: Resolved[Config]) -> dict[str, str]:
    """Every setting as `value  (source)`."""
    return {name: f"{text(getattr(resolved.config, name))}  ({source})" for name, source in resolved.sources.items()}


def _report(said: str) -> None:
    """Print; who reads through a pipe may have seen enough, as `head` has, before the end."""
    try:
        print(said, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the exit flushes what is left again


def _serve(options: argparse.Namespace) -> int:
    resolved = _load(options)
    if options.print_config:
        _report("\n".join(f"{name} = {shown}" for name, shown in _shown(resolved).items()))
        return 0
    _need_extra()
    from . import tracing
    from .lifecycle import Supervisor
    from .media import CONTRACT
    from .models.registry import open_model

    config = resolved.config
    if config.sglang_version:
        _need(_SGLANG_EXTRA, "the front for SGLang", "sglang")
    open_model(config.model, config.load_format, projector=config.projector)  # the cheapest mistakes before any port
    tracing.check(os.environ)
    supervisor = Supervisor(config, CONTRACT)
    telemetry.set_up("supervisor")
    for warning in resolved.warnings:
        log.warning("setting ignored", extra={"reason": warning})
    log.info("starting", extra={"version": __version__, "settings": _shown(resolved)})
    return supervisor.run()


def _check(options: argparse.Namespace) -> int:
    resolved = _load(options)
    for warning in resolved.warnings:
        print(warning, file=sys.stderr)
    _need_extra()
    from . import tracing
    from .check import check
    from .credentials import CredentialFiles

    CredentialFiles(resolved.config)
    tracing.check(os.environ)
    report = check(resolved.config)
    _report(json.dumps(report.as_dict(), indent=2) if options.json else report.as_text())
    return 0


def _collect_env(options: argparse.Namespace) -> int:
    named = {"model", "config"} & vars(options).keys() or {variable("model"), CONFIG_VARIABLE} & os.environ.keys()
    if not named:
        options.model = "none"  # a report without a model is one too
    resolved = _load(options)
    _need_extra()
    from .collect_env import as_text, collect_env

    report = collect_env(_shown(resolved))
    _report(json.dumps(report, indent=2) if options.json else as_text(report))
    return 0


def _soak(options: argparse.Namespace) -> int:
    resolved = _load(options)
    _need_extra()
    from .soak import soak

    verdict = soak(
        resolved.config,
        calls=options.calls,
        seconds=options.minutes * 60,
        concurrency=options.concurrency,
        seed=options.seed,
    )
    print(json.dumps(verdict, indent=2))
    return 0 if verdict["passed"] else 1


def _download(options: argparse.Namespace) -> int:
    _need_extra()
    _need(["huggingface_hub"], "download", "hub")
    from .models.download import download

    shards = download(options.repository, options.revision, options.out)
    print(f"wrote {options.out}: {options.repository} at {options.revision}, weights {', '.join(shards)}")
    return 0


def _bench(options: argparse.Namespace) -> int:
    _need_extra()
    importlib.import_module(f".bench.{options.what}", __package__).main(options.arguments)
    return 0


def _make_checkpoint(options: argparse.Namespace) -> int:
    _need_extra()
    from .models.checkpoint import write_checkpoint

    try:
        write_checkpoint(options.arch, options.out, options.seed)
    except OSError as error:
        raise ConfigError(
            f"cannot write --out {options.out}: {error.strerror}; name a directory that is empty or not there yet"
        ) from error
    print(f"wrote {options.out}: {options.arch} with random weights of seed {options.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
