"""`opticnerve encode|plan|info|health`: what it prints, writes and returns."""

from __future__ import annotations

import asyncio
import errno
import json
import zlib
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import safetensors

from fake_service import (
    SERVICE,
    Abort,
    FakeService,
    answer_all,
    chunks,
    failed,
    finished,
    image_plan,
    replay,
    rows_of,
    serving,
    started,
)
from opticnerve import cli
from opticnerve.v1 import encoder_pb2 as pb

HIT = replay("global", 272)
MISS = pb.PathDispatch(path="local", outcome=pb.OUTCOME_EAGER, units=6, batch_items=1, batch_units=6)


def second_fails(request: pb.EncodeRequest) -> list[Any]:
    rows = rows_of(request.items[0])
    failure = failed(1, grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_INVALID")
    return [failure, started(0, rows), *chunks(0, rows), finished(0, rows, HIT, MISS)]


async def run(address: str, command: str, *arguments: str | Path) -> int:
    argv = [command, "--server", address, "--timeout", "10", *map(str, arguments)]
    return await asyncio.to_thread(cli.main, argv)


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "one.jpg", tmp_path / "two.jpg"]
    for number, path in enumerate(paths, start=1):
        path.write_bytes(bytes([number]) * 10)
    return paths


async def test_encode_prints_a_row_for_each_item(images: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeService(answer_all), healthy=False) as address:
        assert await run(address, "encode", *images) == 0
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header == ["item", "size", "grid", "tokens", "path", "outcome", "budget", "ms", "crc32"]
    for number, (path, row) in enumerate(zip(images, rows, strict=True), start=1):
        checksum = zlib.crc32(np.full(48, number, ml_dtypes.bfloat16).tobytes())
        assert row == [str(path), "32x192", "1x2x12", "6", "default", "replay", "64", "5.0", f"{checksum:08x}"]


async def test_files_named_like_videos_are_sent_as_videos(images: list[Path], tmp_path: Path) -> None:
    clips = [tmp_path / name for name in ("a.mp4", "b.WEBM", "c.mkv", "d.mov", "e.m4v")]
    for clip in clips:
        clip.write_bytes(b"v")
    service = FakeService(answer_all)
    async with serving(service) as address:
        assert await run(address, "encode", *images, *clips) == 0
    kinds = [item.WhichOneof("media") for item in service.encode_requests[0].items]
    assert kinds == ["encoded_image"] * 2 + ["encoded_video"] * 5


async def test_parts_of_a_long_video_are_told_once(images: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    def in_parts(request: pb.EncodeRequest) -> list[Any]:
        rows = rows_of(request.items[0])
        parts = [replay("default", 256)] * 3 + [replay("default", 64)]
        return [started(0, rows), *chunks(0, rows), finished(0, rows, *parts)]

    async with serving(FakeService(in_parts)) as address:
        assert await run(address, "encode", images[0]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[4:7] == ["default", "replay", "256+64"]


async def test_encode_with_a_failed_item(images: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeService(second_fails)) as address:
        assert await run(address, "encode", *images) == 1
    output = capsys.readouterr()
    _, first, second = [line.split() for line in output.out.splitlines()]
    assert first[1:8] == ["32x192", "1x2x12", "6", "global+local", "replay+eager", "272+-", "5.0"]
    assert second == [str(images[1]), "-", "-", "-", "-", "failed", "-", "-", "-"]
    assert output.err == f"opticnerve: {images[1]}: as scripted (IMAGE_INVALID)\n"


async def test_encode_as_json(images: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeService(second_fails)) as address:
        assert await run(address, "encode", "--json", *images) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert (first["item"], first["plan"]["grid"], first["plan"]["tokens"]) == (str(images[0]), [1, 2, 12], 6)
    assert (first["dtype"], first["hidden"], first["deepstack_levels"], first["outcome"]) == ("bfloat16", 8, 0, "eager")
    assert [dispatch["budget"] for dispatch in first["dispatches"]] == [272, 0]
    assert first["timings"]["execute"] == 0.003
    assert first["digest"] == bytes(range(32)).hex()
    assert (second["item"], second["error"]["reason"]) == (str(images[1]), "IMAGE_INVALID")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
async def test_encode_writes_the_rows(images: list[Path], tmp_path: Path, dtype: str) -> None:
    out = tmp_path / "rows.safetensors"
    async with serving(FakeService(answer_all)) as address:
        assert await run(address, "encode", "--dtype", dtype, "--out", out, *images) == 0
    with safetensors.safe_open(out, framework="pt") as file:
        assert set(file.keys()) == {"0", "1"}
        metadata = {key: json.loads(text) for key, text in file.metadata().items()}
        for number, key in enumerate(("0", "1"), start=1):
            tensor = file.get_tensor(key)
            assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{dtype}", (6, 8))
            assert (tensor == number).all()
            assert (metadata[key]["item"], metadata[key]["plan"]["tokens"]) == (str(images[number - 1]), 6)


async def test_encode_writes_what_succeeded(images: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "rows.safetensors"
    async with serving(FakeService(second_fails)) as address:
        assert await run(address, "encode", "--out", out, *images) == 1
    with safetensors.safe_open(out, framework="np") as file:
        assert list(file.keys()) == ["0"]
        assert json.loads(file.metadata()["1"])["error"]["reason"] == "IMAGE_INVALID"


async def test_rows_that_cannot_be_written(
    images: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    async with serving(FakeService(answer_all)) as address:
        assert await run(address, "encode", "--out", tmp_path / "rows.safetensors", *images) == 1
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 3, "the table is there nonetheless"
    assert output.err.startswith("opticnerve: cannot write ")
    assert "No space left on device; name another file" in output.err


async def test_plan(images: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    def planner(request: pb.PlanItemsRequest) -> pb.PlanItemsResponse:
        refused = failed(0, grpc.StatusCode.INVALID_ARGUMENT, "ITEM_TOO_LARGE").failed
        assert (request.items[0].size.height, request.items[0].size.width) == (480, 640)
        assert request.items[1].header == b"\x01" * 10
        plans = [pb.PlannedItem(plan=image_plan(5)), pb.PlannedItem(plan=image_plan(6)), pb.PlannedItem(failed=refused)]
        return pb.PlanItemsResponse(items=plans[: len(request.items)])

    service = FakeService(answer_all)
    service.plan = planner
    async with serving(service) as address:
        assert await run(address, "plan", "480x640", images[0]) == 0
        table = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert await run(address, "plan", "--json", "480x640", images[0], "9000x9000") == 1
    assert table == [
        ["item", "size", "grid", "tokens"],
        ["480x640", "32x160", "1x2x10", "5"],
        [str(images[0]), "32x192", "1x2x12", "6"],
    ]
    output = capsys.readouterr()
    records = json.loads(output.out)
    assert [record["item"] for record in records] == ["480x640", str(images[0]), "9000x9000"]
    assert records[0]["plan"]["spans"][0]["kind"] == "image"
    assert records[2]["error"]["metadata"] == {"limit": "7"}
    assert output.err == "opticnerve: 9000x9000: as scripted (ITEM_TOO_LARGE)\n"


async def test_plan_of_a_video(capsys: pytest.CaptureFixture[str]) -> None:
    service = FakeService(answer_all)
    service.plan = lambda _: pb.PlanItemsResponse(items=[pb.PlannedItem(plan=image_plan(5))] * 2)
    async with serving(service) as address:
        assert await run(address, "plan", "32@24:720x1280", "7@29.97:48x80") == 0
    sizes = [(s.size.frames, s.size.fps, s.size.height, s.size.width) for s in service.plan_requests[0].items]
    assert sizes == [(32, 24.0, 720, 1280), (7, 29.97, 48, 80)]
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["item", "32@24:720x1280", "7@29.97:48x80"]


async def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    info = pb.GetServerInfoResponse(
        version="1.2.3",
        model="tiny",
        phase=pb.PHASE_CAPTURING,
        phase_detail="7 of 36 graphs",
        layout=pb.Layout(hidden=64, deepstack_levels=3),
        paths=[pb.PathInfo(name="default", budgets=[64, 80], graph_memory_bytes=3 << 20)],
        limits=pb.Limits(max_request_bytes=1000),
        reasons={"attention_backend": "no CUDA"},
    )
    async with serving(FakeService(answer_all, info=info), healthy=False) as address:
        assert await run(address, "info") == 0
        lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        assert await run(address, "info", "--json") == 0
    for line in (
        "version 1.2.3",
        "model tiny",
        "phase CAPTURING 7 of 36 graphs",
        "row 64 x 4 levels",
        "path default 64, 80 (3 MiB)",
        "max request bytes 1000",
        "attention_backend: reason no CUDA",
    ):
        assert line in lines
    record = json.loads(capsys.readouterr().out)
    assert (record["phase"], record["paths"][0]["budgets"]) == ("PHASE_CAPTURING", [64, 80])


@pytest.mark.parametrize(("healthy", "status", "code"), [(True, "SERVING", 0), (False, "NOT_SERVING", 1)])
async def test_health(healthy: bool, status: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeService(answer_all), healthy=healthy) as address:
        assert await run(address, "health") == code
        assert capsys.readouterr().out == f"{status}\n"
        assert await run(address, "health", "--json", SERVICE) == code
        assert json.loads(capsys.readouterr().out) == {"service": SERVICE, "status": status}
        assert await run(address, "health", "no.such.Service") == 1
        said = "opticnerve: the server's health has no name 'no.such.Service': ask for opticnerve.v1.EncoderService, "
        assert capsys.readouterr().err.startswith(said)


async def test_a_call_that_fails_says_why(images: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    loading = Abort(grpc.StatusCode.UNAVAILABLE, "LOADING", "the server is reading its model", retry_after=30)
    async with serving(FakeService(lambda _: [loading]), healthy=False) as address:
        assert await run(address, "encode", images[0]) == 1
    assert capsys.readouterr() == ("", "opticnerve: the server is reading its model (LOADING)\n")
    assert await run("127.0.0.1:1", "info") == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required"),
        (["decode"], "invalid choice: 'decode'"),
        (["encode"], "required: FILE"),
        (["encode", "no such file.jpg"], "there is no file no such file.jpg"),
        (["encode", __file__, "--dtype", "int8"], "invalid choice: 'int8'"),
        (["encode", __file__, "--out", "/no/such/directory/x.safetensors"], "there is no directory /no/such/directory"),
        (["encode", __file__, "--out", str(Path(__file__).parent)], "is a directory: name a file in it"),
        (["plan", "2x2", "99999999999x2"], "99999999999x2 is no size: its numbers must be at most 4294967295"),
        (["plan", "9999999999@1:2x2"], "9999999999@1:2x2 is no size"),
        (["plan", "640*480"], "there is no file 640*480"),
        (["info", "--timeout", "0"], "0 is no number of seconds over 0"),
        (["info", "--timeout", "soon"], "soon is no number of seconds over 0"),
    ],
)
def test_wrong_usage_exits_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err
