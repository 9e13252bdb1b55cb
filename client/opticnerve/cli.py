"""`opticnerve encode|plan|info|health`: the client for people and smoke tests.

Exit codes: 0 all is well; 1 the call or one of its items failed, or the server is not healthy; 2 wrong usage. No call
waits for a server that is not ready: it fails and says what the server is doing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from safetensors.numpy import save

from opticnerve.channel import Tls
from opticnerve.client import DEFAULT_SERVER, DEFAULT_TIMEOUT_S
from opticnerve.errors import OpticnerveError, ServerError
from opticnerve.media import MAX_SIZE, MediaSource, SizeSource, Video, VideoSize
from opticnerve.sync import Client
from opticnerve.tensors import Array, Embedding, ItemPlan
from opticnerve.v1 import encoder_pb2 as pb

_ENCODE_HEADER = ("item", "size", "grid", "tokens", "path", "outcome", "budget", "ms", "crc32")
_PLAN_HEADER = ("item", "size", "grid", "tokens")

_VIDEO_SUFFIXES = {".mp4", ".m4v", ".mov", ".webm", ".mkv"}
"""Names of files that are sent as videos; all others are sent as images."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; `argv` without the program's name, by default the process's. Returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if (args.tls_cert is None) != (args.tls_key is None):
        parser.error("--tls-cert and --tls-key go together: give both or neither")
    try:
        token = args.token_file.read_text(encoding="ascii").strip() if args.token_file else ""
        tls = Tls(args.tls_ca, args.tls_cert, args.tls_key) if args.tls or args.tls_ca or args.tls_cert else None
        with Client(args.server, timeout=args.timeout, wait_until_ready=False, tls=tls, token=token) as client:
            code: int = args.run(client, args)
            return code
    except (OpticnerveError, OSError, UnicodeDecodeError) as error:
        print(f"opticnerve: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--server", default=DEFAULT_SERVER, help="gRPC target (default: %(default)s)")
    common.add_argument("--json", action="store_true", help="print JSON")
    common.add_argument(
        "--timeout", type=_seconds, default=DEFAULT_TIMEOUT_S, help="seconds for each call (default: %(default)s)"
    )
    common.add_argument(
        "--token-file", type=_existing_file, metavar="FILE", help="file with the token to call with, and nothing else"
    )
    common.add_argument("--tls", action="store_true", help="encrypt, and trust the authorities that gRPC comes with")
    common.add_argument(
        "--tls-ca", type=_existing_file, metavar="FILE", help="encrypt, and trust these authorities, PEM"
    )
    common.add_argument(
        "--tls-cert", type=_existing_file, metavar="FILE", help="encrypt, and show this certificate chain, PEM"
    )
    common.add_argument("--tls-key", type=_existing_file, metavar="FILE", help="key of --tls-cert, PEM")
    parser = argparse.ArgumentParser(prog="opticnerve", description="Calls an Opticnerve server.")
    commands = parser.add_subparsers(required=True, metavar="encode|plan|info|health")

    encode = commands.add_parser("encode", parents=[common], help="encode image and video files")
    encode.add_argument(
        "files",
        nargs="+",
        type=_existing_file,
        metavar="FILE",
        help=f"image file, or a video when its name ends in {', '.join(sorted(_VIDEO_SUFFIXES))}",
    )
    encode.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    encode.add_argument(
        "--out",
        type=_writable_file,
        metavar="FILE.safetensors",
        help='write the rows there: tensor "0" is the first item, its metadata says the rest',
    )
    encode.set_defaults(run=_encode)

    plan = commands.add_parser("plan", parents=[common], help="say what encode would answer, without encoding")
    plan.add_argument(
        "sizes",
        nargs="+",
        type=_size,
        metavar="HEIGHTxWIDTH|FRAMES@FPS:HEIGHTxWIDTH|IMAGE",
        help="size of an image in pixels, frames, rate and size of a video, or image file",
    )
    plan.set_defaults(run=_plan)

    info = commands.add_parser("info", parents=[common], help="describe the server")
    info.set_defaults(run=_info)

    health = commands.add_parser("health", parents=[common], help="ask whether the server is serving")
    health.add_argument("service", nargs="?", default="", metavar="SERVICE", help="default: the whole server")
    health.set_defaults(run=_health)
    return parser


def _encode(client: Client, args: argparse.Namespace) -> int:
    rows: list[Sequence[str]] = []
    records: list[dict[str, Any]] = []
    tensors: dict[str, Array] = {}
    failures: list[str] = []
    answers = client.encode([_media(file) for file in args.files], dtype=args.dtype, return_errors=True)
    for index, (file, answer) in enumerate(zip(args.files, answers, strict=True)):
        if isinstance(answer, ServerError):
            failures.append(_failure(str(file), answer))
            rows.append([str(file), "-", "-", "-", "-", "failed", "-", "-", "-"])
            records.append({"item": str(file), "error": _error_record(answer)})
        else:
            rows.append([str(file), *_embedding_row(answer)])
            records.append({"item": str(file), **_embedding_record(answer)})
            if args.out:
                tensors[str(index)] = answer.array
    if args.out:
        metadata = {str(index): json.dumps(record) for index, record in enumerate(records)}
        try:
            args.out.write_bytes(save(tensors, metadata))  # not save_file, whose files only their owner may read
        except OSError as error:
            failures.append(f"cannot write {args.out}: {error.strerror}; name another file with --out")
    return _report(args, _ENCODE_HEADER, rows, records, failures)


def _plan(client: Client, args: argparse.Namespace) -> int:
    rows: list[Sequence[str]] = []
    records: list[dict[str, Any]] = []
    failures: list[str] = []
    for size, answer in zip(args.sizes, client.plan(args.sizes, return_errors=True), strict=True):
        name = _size_name(size)
        if isinstance(answer, ServerError):
            failures.append(_failure(name, answer))
            rows.append([name, "-", "-", "-"])
            records.append({"item": name, "error": _error_record(answer)})
        else:
            rows.append([name, *_plan_row(answer)])
            records.append({"item": name, "plan": asdict(answer)})
    return _report(args, _PLAN_HEADER, rows, records, failures)


def _info(client: Client, args: argparse.Namespace) -> int:
    info = client.info()
    if args.json:
        print(json.dumps(MessageToDict(info, preserving_proto_field_name=True), indent=2))
    else:
        print(_table(_info_rows(info)))
    return 0


def _health(client: Client, args: argparse.Namespace) -> int:
    status = client.health(args.service)
    print(json.dumps({"service": args.service, "status": status}) if args.json else status)
    return 0 if status == "SERVING" else 1


def _report(
    args: argparse.Namespace,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    records: Sequence[dict[str, Any]],
    failures: Sequence[str],
) -> int:
    print(json.dumps(records, indent=2) if args.json else _table([header, *rows]))
    for failure in failures:
        print(f"opticnerve: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _failure(name: str, error: ServerError) -> str:
    """The sentence of an item that its name tells better than its index."""
    return f"{name}: {error.message} ({error.reason or error.code})"


def _plan_row(plan: ItemPlan) -> list[str]:
    return [f"{plan.processed_height}x{plan.processed_width}", "x".join(map(str, plan.grid)), str(plan.tokens)]


def _embedding_row(embedding: Embedding) -> list[str]:
    dispatches = embedding.dispatches
    return [
        *_plan_row(embedding.plan),
        _joined(dispatch.path for dispatch in dispatches) or "-",
        _joined(dispatch.outcome for dispatch in dispatches) or embedding.outcome,
        _joined(str(dispatch.budget or "-") for dispatch in dispatches) or "-",
        f"{1000 * embedding.timings.total:.1f}",
        f"{embedding.crc32:08x}",
    ]


def _joined(words: Iterable[str]) -> str:
    """Each word once: a long video runs as many parts."""
    return "+".join(dict.fromkeys(words))


def _embedding_record(embedding: Embedding) -> dict[str, Any]:
    return {
        "plan": asdict(embedding.plan),
        "dtype": embedding.array.dtype.name,
        "hidden": embedding.hidden,
        "deepstack_levels": len(embedding.deepstack),
        "outcome": embedding.outcome,
        "dispatches": [asdict(dispatch) for dispatch in embedding.dispatches],
        "timings": asdict(embedding.timings),
        "digest": embedding.digest.hex(),
        "crc32": f"{embedding.crc32:08x}",
        "instance_id": embedding.instance_id,
    }


def _error_record(error: ServerError) -> dict[str, Any]:
    return {
        "code": error.code,
        "reason": error.reason,
        "message": error.message,
        "retry_after": error.retry_after,
        "metadata": error.metadata,
    }


def _info_rows(info: pb.GetServerInfoResponse) -> list[Sequence[str]]:
    layout = info.layout
    rows: list[Sequence[str]] = [
        ("version", info.version),
        ("instance", info.instance_id),
        ("phase", f"{pb.Phase.Name(info.phase).removeprefix('PHASE_')} {info.phase_detail}"),
        ("model", info.model),
        ("architecture", info.architecture),
        ("fingerprint", info.fingerprint),
        ("device", info.device),
        ("attention backend", info.attention_backend),
        ("modalities", ", ".join(info.modalities)),
        ("row", f"{layout.hidden} x {1 + layout.deepstack_levels} levels"),
    ]
    for path in info.paths:
        budgets = ", ".join(map(str, path.budgets)) or "no graphs"
        rows.append((f"path {path.name}", f"{budgets} ({path.graph_memory_bytes / 2**20:.0f} MiB)"))
    for field, value in info.limits.ListFields():
        rows.append((field.name.replace("_", " "), str(value)))
    occupancy = info.occupancy
    rows.append(("occupancy", f"{occupancy.items} items, {occupancy.tokens} tokens, {occupancy.bytes} bytes"))
    rows += [(f"{name}: reason", reason) for name, reason in sorted(info.reasons.items())]
    rows += [(f"decode: {topic}", sentence) for topic, sentence in sorted(info.decode_contract.items())]
    return rows


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds over 0")
    return seconds


def _existing_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path


def _writable_file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a directory: name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written: name a file elsewhere")
    return path


def _media(file: Path) -> MediaSource:
    return Video(file) if file.suffix.lower() in _VIDEO_SUFFIXES else file


def _size(text: str) -> SizeSource:
    match = re.fullmatch(r"(?:(\d+)@(\d+(?:\.\d+)?):)?(\d+)x(\d+)", text)
    if match is None:
        return _existing_file(text)
    frames, fps, height, width = match.groups()
    if max(int(height), int(width), int(frames or 0)) > MAX_SIZE:
        raise argparse.ArgumentTypeError(f"{text} is no size: its numbers must be at most {MAX_SIZE}")
    if frames is None:
        return int(height), int(width)
    return VideoSize(int(frames), float(fps), int(height), int(width))


def _size_name(size: SizeSource) -> str:
    match size:
        case VideoSize():
            return f"{size.frames}@{size.fps:g}:{size.height}x{size.width}"
        case (height, width):
            return f"{height}x{width}"
        case _:
            return str(size)


if __name__ == "__main__":
    sys.exit(main())
