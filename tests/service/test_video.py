"""Videos and patches over a real channel, in front of an engine whose rows the test computes for itself."""

from __future__ import annotations

import asyncio
import hashlib
import io
import struct
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

import opticnerve
from fake_engine import rows_of
from fake_planner import FakePlanner
from frontend_harness import Answer, collect, png_item, raw_item, reason_of, serving, until
from opticnerve.media import MediaSource, to_items
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve_server.service import MAX_VIDEOS
from video_files import LOSSLESS, MATROSKA, WEBM, encode, picture, sound_alone, without_frames

Pictures = list[npt.NDArray[np.uint8]]
CLIP = [picture(number) for number in range(9)]


def one(source: MediaSource) -> pb.Item:
    [item] = to_items([source])
    return item


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def assert_ok(answer: Answer, frames: Pictures) -> None:
    """`frames` have sides of whole tokens: the fake planner leaves them in the slot as they are."""
    assert answer.failed is None, answer.failed
    assert answer.started is not None
    pixels = np.stack(frames)
    tokens = pixels[..., 0].size // 64
    assert answer.started.plan.tokens == tokens == sum(span.rows for span in answer.started.plan.spans)
    assert answer.data == rows_of(pixels, tokens, FakePlanner.layout.width, "bfloat16").tobytes()


async def encoded(server: Any, *items: pb.Item) -> list[Answer]:
    answers = await collect(server.stub.Encode(pb.EncodeRequest(items=items)))
    return [answers[index] for index in range(len(items))]


async def test_a_file_and_lists_of_its_frames() -> None:
    sources: list[MediaSource] = [
        opticnerve.Video(encode(CLIP, **LOSSLESS)),
        opticnerve.Frames(CLIP, fps=25),
        opticnerve.Frames([png(frame) for frame in CLIP], fps=25),
        opticnerve.Frames([Image.fromarray(frame) for frame in CLIP], fps=25),
    ]
    async with serving() as server:
        answers = await encoded(server, *map(one, sources))
    for answer in answers:
        assert_ok(answer, CLIP)
        assert answer.started is not None
        plan = answer.started.plan
        assert (plan.grid_thw.t, plan.grid_thw.h, plan.grid_thw.w) == (9, 12, 20)
        assert list(plan.frame_indices) == list(range(9))
        assert list(plan.timestamps) == [index / 25 for index in range(9)]
        assert {span.kind for span in plan.spans} == {pb.Span.KIND_FRAME}


@pytest.mark.parametrize("encoding", [{}, MATROSKA, WEBM, {"container": "mov"}], ids=["MP4", "MKV", "WebM", "MOV"])
async def test_every_container(encoding: dict[str, Any]) -> None:
    async with serving() as server:
        [answer] = await encoded(server, one(opticnerve.Video(encode(9, **encoding))))
    assert answer.started is not None
    assert (answer.started.plan.grid_thw.t, answer.started.plan.tokens) == (9, 9 * 60)


async def test_images_and_videos_in_one_call_keep_their_places() -> None:
    image = picture(5)
    items = [
        raw_item(image),
        one(opticnerve.Frames(CLIP, 2.0)),
        png_item(image),
        one(opticnerve.Frames(CLIP[3:4], 1.0)),
    ]
    async with serving() as server:
        first, second, third, fourth = await encoded(server, *items)
    assert_ok(first, [image])
    assert_ok(second, CLIP)
    assert_ok(third, [image])
    assert_ok(fourth, CLIP[3:4])


async def test_only_sampled_frames_are_decoded() -> None:
    broken = png(CLIP[2])[:60]  # the header is whole
    files = [png(CLIP[0]), png(CLIP[1]), broken]
    async with serving() as server:
        fine, bad = await encoded(
            server, one(opticnerve.Frames(files, 25, num_frames=2)), one(opticnerve.Frames(files, 25))
        )
    assert_ok(fine, CLIP[:2])
    assert bad.failed is not None
    assert bad.failed.message.startswith("frames[2]: the PNG file is truncated")


def frame_list(*frames: pb.Frame, fps: float = 25.0) -> pb.Item:
    return pb.Item(frame_list=pb.FrameList(frames=frames, fps=fps))


def raw_frame(height: int, width: int, size: int | None = None) -> pb.Frame:
    data = bytes(height * width * 3 if size is None else size)
    return pb.Frame(raw_image=pb.RawImage(height=height, width=width, data=data))


def bad_videos() -> list[tuple[pb.Item, str, str]]:
    whole = encode(12)
    return [
        (one(opticnerve.Video(whole[:-128])), "IMAGE_INVALID", "truncated"),
        (one(opticnerve.Video(encode(12, **WEBM)[:-128])), "IMAGE_INVALID", "truncated"),
        (one(opticnerve.Video(sound_alone())), "IMAGE_INVALID", "no video stream"),
        (one(opticnerve.Video(without_frames())), "IMAGE_INVALID", "no frames"),
        (one(opticnerve.Video(b"")), "IMAGE_INVALID", "the video file is empty"),
        (one(opticnerve.Video(png(CLIP[0]))), "IMAGE_INVALID", "none of the known containers"),
        (one(opticnerve.Video(encode(41))), "IMAGE_INVALID", "max_video_frames"),
        (one(opticnerve.Video(encode(12, rate=1))), "IMAGE_INVALID", "max_video_seconds"),
        (one(opticnerve.Video(encode([picture(0, 160, 160)] * 2))), "IMAGE_INVALID", "max_image_pixels"),
        (one(opticnerve.Video(encode(40))), "ITEM_TOO_LARGE", "fewer frames"),
        (one(whole), "IMAGE_INVALID", "none of the known formats"),
        (frame_list(), "IMAGE_INVALID", "no frames"),
        (frame_list(pb.Frame()), "IMAGE_INVALID", "frames[0] has no media"),
        (frame_list(raw_frame(8, 8), raw_frame(8, 8, 5)), "IMAGE_INVALID", "frames[1]: the raw image has 5 bytes"),
        (frame_list(raw_frame(8, 8), raw_frame(16, 8)), "IMAGE_INVALID", "frames[1] is not 8 x 8"),
        (frame_list(raw_frame(160, 160)), "IMAGE_INVALID", "max_image_pixels"),
        (frame_list(*[raw_frame(8, 8)] * 41), "IMAGE_INVALID", "max_video_frames"),
        (frame_list(*[raw_frame(8, 8)] * 11, fps=1), "IMAGE_INVALID", "max_video_seconds"),
        (frame_list(raw_frame(8, 8), fps=0), "IMAGE_INVALID", "set its fps"),
        (frame_list(raw_frame(8, 8), fps=float("nan")), "IMAGE_INVALID", "set its fps"),
    ]


LIMITS: dict[str, Any] = {
    "max_video_frames": 40, "max_video_seconds": 10.0, "max_image_pixels": 20_000, "max_item_tokens": 1000,
}  # fmt: skip


async def test_every_bad_video_fails_alone() -> None:
    bad = bad_videos()
    items = [one(opticnerve.Frames(CLIP, 25)), *[item for item, _, _ in bad], raw_item(CLIP[4])]
    async with serving(**LIMITS) as server:
        first, *failures, last = await encoded(server, *items)
        assert len(server.engine.submitted) == 2
    assert_ok(first, CLIP)
    assert_ok(last, CLIP[4:5])
    for answer, (_, reason, text) in zip(failures, bad, strict=True):
        assert answer.failed is not None, text
        assert (answer.failed.code, answer.failed.reason) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], reason)
        assert text in answer.failed.message
        assert len(answer.failed.message) < 400


async def test_a_video_that_turns_out_broken_while_it_is_decoded_fails_alone() -> None:
    data = bytearray(encode(CLIP, options={"preset": "ultrafast", "g": "1"}))
    middle = data.index(b"mdat") + (len(data) - data.index(b"mdat")) // 2
    data[middle : middle + 400] = bytes(400)
    async with serving() as server:
        good, bad = await encoded(server, one(opticnerve.Frames(CLIP, 25)), one(opticnerve.Video(bytes(data))))
    assert_ok(good, CLIP)
    assert bad.failed is not None
    assert bad.failed.reason == "IMAGE_INVALID"


async def test_a_plan_of_more_frames_than_a_message_holds_is_refused() -> None:
    async with serving(max_video_frames=3000, max_item_tokens=None) as server:
        size = pb.MediaSize.Size(height=8, width=8, frames=2049, fps=30)
        planned = await server.stub.PlanItems(pb.PlanItemsRequest(items=[pb.MediaSize(size=size)]))
        size.sampling.num_frames = 2048
        sampled = await server.stub.PlanItems(pb.PlanItemsRequest(items=[pb.MediaSize(size=size)]))
        [answer] = await encoded(server, frame_list(*[raw_frame(8, 8)] * 2048))
    assert planned.items[0].failed.reason == "ITEM_TOO_LARGE"
    assert "set sampling.fps or num_frames" in planned.items[0].failed.message
    assert sampled.items[0].plan.tokens == 2048
    assert_ok(answer, [np.zeros((8, 8, 3), np.uint8)] * 2048)


async def test_plans_are_those_of_encode() -> None:
    size = pb.MediaSize.Size(height=48, width=80, frames=9, fps=25)
    size.sampling.num_frames = 4
    async with serving() as server:
        planned = await server.stub.PlanItems(pb.PlanItemsRequest(items=[pb.MediaSize(size=size)]))
        [answer] = await encoded(server, one(opticnerve.Video(encode(9), num_frames=4)))
    assert answer.started is not None
    assert planned.items[0].plan == answer.started.plan
    assert list(planned.items[0].plan.frame_indices) == [0, 1, 2, 3]


async def test_the_header_of_a_video_is_refused_with_the_remedy() -> None:
    async with serving() as server:
        items = [pb.MediaSize(header=encode(3, **container)[:4096]) for container in ({}, WEBM)]
        planned = await server.stub.PlanItems(pb.PlanItemsRequest(items=items))
    for item in planned.items:
        assert item.failed.reason == "IMAGE_INVALID"
        assert "give its frames, fps, height and width" in item.failed.message


async def test_too_many_videos_in_a_call() -> None:
    items = [frame_list(raw_frame(8, 8))] * (MAX_VIDEOS + 1)
    sizes = [pb.MediaSize(size=pb.MediaSize.Size(height=8, width=8, frames=1, fps=1))] * (MAX_VIDEOS + 1)
    async with serving() as server:
        with pytest.raises(grpc.aio.AioRpcError) as encoding:
            await collect(server.stub.Encode(pb.EncodeRequest(items=items)))
        with pytest.raises(grpc.aio.AioRpcError) as planning:
            await server.stub.PlanItems(pb.PlanItemsRequest(items=sizes))
        assert reason_of(encoding.value) == reason_of(planning.value) == "REQUEST_TOO_LARGE"
        assert len(await encoded(server, *items[1:])) == MAX_VIDEOS


async def test_a_server_of_images_alone() -> None:
    videos = [
        one(opticnerve.Video(b"never looked at")),
        one(opticnerve.Frames(CLIP, 25)),
        patches_item(2, pixels="pixel_values_videos", grid="video_grid_thw"),
    ]
    size = pb.MediaSize(size=pb.MediaSize.Size(height=8, width=8, frames=1, fps=1))
    async with serving(modalities="image") as server:
        *refused, image = await encoded(server, *videos, raw_item(CLIP[0]))
        planned = await server.stub.PlanItems(pb.PlanItemsRequest(items=[size]))
        info = await server.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert_ok(image, CLIP[:1])
    assert list(info.modalities) == ["image"]
    for failed in (*[answer.failed for answer in refused], planned.items[0].failed):
        assert failed is not None
        assert failed.reason == "UNIMPLEMENTED"
        assert "this server takes no videos (modalities image)" in failed.message


async def test_a_server_says_what_it_takes() -> None:
    async with serving(max_video_frames=7, max_video_seconds=8.5) as server:
        info = await server.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert list(info.modalities) == ["image", "video"]
    assert (info.limits.max_video_frames, info.limits.max_video_seconds) == (7, 8.5)
    assert {"damage", "video damage"} <= info.decode_contract.keys()


async def test_decoding_ends_when_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, waits, goes_on = [], threading.Event(), threading.Event()

    def endless(*_: object, **__: object) -> Iterator[npt.NDArray[np.uint8]]:
        for number in range(9):
            decoded.append(number)
            yield picture(number)
            waits.set()
            goes_on.wait(10)

    monkeypatch.setattr("opticnerve_server.items.video.frames", endless)
    async with serving(preprocess_threads=1) as server:
        call = server.stub.Encode(pb.EncodeRequest(items=[one(opticnerve.Video(encode(9)))]))
        collecting = asyncio.create_task(collect(call))
        await until(waits.is_set)
        collecting.cancel()
        await until(lambda: server.frontend._service.idle.is_set())
        assert server.engine.slots, "the thread still writes into it"
        goes_on.set()
        await until(lambda: not server.engine.slots)
    assert decoded == [0, 1]


def patches_item(
    frames: int, pixels: str = "pixel_values", grid: str = "image_grid_thw", **changes: pb.NamedTensor
) -> pb.Item:
    """Patches of the fake planner's kind, all of level 7, with tensors changed."""
    tensors = {
        pixels: pb.NamedTensor(name=pixels, dtype="uint8", shape=[4 * frames, 48], data=bytes([7]) * 4 * frames * 48),
        grid: pb.NamedTensor(name=grid, dtype="int64", shape=[3], data=struct.pack("<3q", frames, 2, 2)),
    }
    return pb.Item(patches=pb.Patches(tensors=list((tensors | changes).values())))


async def test_patches() -> None:
    sevens = np.full((8, 8, 3), 7, np.uint8)
    grid = pb.NamedTensor(name="image_grid_thw", dtype="int64", shape=[1, 3], data=struct.pack("<3q", 1, 2, 2))
    items = [
        patches_item(1),
        patches_item(1, image_grid_thw=grid),
        patches_item(3, pixels="pixel_values_videos", grid="video_grid_thw"),
    ]
    async with serving() as server:
        still, other, clip = await encoded(server, *items)
    assert_ok(still, [sevens])
    assert_ok(other, [sevens])
    assert_ok(clip, [sevens] * 3)


def tensor(name: str, dtype: str, shape: list[int], size: int) -> pb.NamedTensor:
    return pb.NamedTensor(name=name, dtype=dtype, shape=shape, data=bytes(size))


async def test_every_bad_patches_item_fails_alone() -> None:
    values, grid, positions = "pixel_values", "image_grid_thw", "image_position_ids"
    alone = tensor("pixel_values_videos", "uint8", [1, 4, 48], 192)

    def positioned(positions: pb.NamedTensor) -> pb.Item:
        return pb.Item(patches=pb.Patches(tensors=[tensor(values, "uint8", [1, 4, 48], 192), positions]))

    bad = [
        (pb.Item(patches=pb.Patches()), "the tensors are none"),
        (patches_item(1, extra=tensor("input_ids", "int64", [1], 8)), "the tensors are pixel_values, image_grid_thw"),
        (patches_item(1, extra=tensor(values, "uint8", [4, 48], 192)), "the tensors are pixel_values"),
        (patches_item(1, pixels="pixel_values_videos"), "send pixel_values and image_grid_thw"),
        (patches_item(1, grid="num_patches"), "num_patches counts tiles"),
        (patches_item(1, grid="num_crops"), "send these as aspect_ratios, int64 [1, 2]"),
        (patches_item(1, grid="aspect_ratios"), "aspect_ratios is int64 [3], must be int64 [2] or [1, 2]"),
        (patches_item(1, grid="image_grid_hws"), "image_grid_hws is int64 [3], must be int64 [2] or [1, 2]"),
        (pb.Item(patches=pb.Patches(tensors=[alone])), "[1, 4, 48]: alone it must be the tiles of one video"),
        (patches_item(1, pixel_values=tensor(values, "float64", [4, 48], 1536)), "dtype float64"),
        (patches_item(1, pixel_values=tensor(values, "int64", [4, 48], 1536)), "pixel_values is int64"),
        (patches_item(1, pixel_values=tensor(values, "float32", [4, 48], 767)), "has 767 bytes"),
        (patches_item(1, pixel_values=tensor(values, "uint8", [1 << 63, 0], 0)), "no axis empty"),
        (patches_item(1, pixel_values=tensor(values, "uint8", [5, 48], 240)), "of shape [5, 48]"),
        (patches_item(1, image_grid_thw=tensor(grid, "int64", [2, 3], 48)), "as one item"),
        (patches_item(1, image_grid_thw=tensor(grid, "float32", [3], 12)), "must be int64"),
        (positioned(tensor(positions, "float32", [1, 4, 2], 32)), "image_position_ids is float32"),
        (positioned(tensor(positions, "int64", [4, 2], 64)), "must be int64 [frames, patches, 2]"),
        (positioned(tensor(positions, "int64", [1, 3, 2], 48)), "[1, 3, 2] for patches of shape [1, 4, 48]"),
        (positioned(tensor(positions, "int64", [1, 4, 2], 64)), "not (column, row) of a whole raster"),
        (patches_item(1, grid=positions, image_position_ids=tensor(positions, "int64", [4, 2], 64)), "shape [4, 48]"),
        (patches_item(1, grid="video_position_ids"), "pixel_values_videos and video_position_ids"),
    ]
    async with serving() as server:
        *failures, good = await encoded(server, *[item for item, _ in bad], raw_item(CLIP[0]))
    assert_ok(good, CLIP[:1])
    for answer, (_, text) in zip(failures, bad, strict=True):
        assert answer.failed is not None, text
        assert answer.failed.reason == "IMAGE_INVALID"
        assert text in answer.failed.message


async def test_digests_are_those_of_the_contract() -> None:
    data, stills = encode(3), CLIP[:2]
    items = [
        one(opticnerve.Video(data, num_frames=2)),
        one(opticnerve.Frames([stills[0], png(stills[1])], 2.5)),
        patches_item(1),
    ]
    raw = hashlib.sha256(b"raw_image\0" + struct.pack("<II", 48, 80) + stills[0].tobytes()).digest()
    file = hashlib.sha256(b"encoded_image\0" + png(stills[1])).digest()
    tensors = (
        b"image_grid_thw\0int64\0" + struct.pack("<IQ", 1, 3) + struct.pack("<3q", 1, 2, 2)
        + b"pixel_values\0uint8\0" + struct.pack("<IQQ", 2, 4, 48) + bytes([7]) * 192
    )  # fmt: skip
    expected = [
        hashlib.sha256(b"encoded_video\0" + data).digest(),
        hashlib.sha256(b"frame_list\0" + struct.pack("<d", 2.5) + raw + file).digest(),
        hashlib.sha256(b"patches\0" + tensors).digest(),
    ]
    async with serving() as server:
        answers = await encoded(server, *items)
    assert [answer.started.digest for answer in answers if answer.started] == expected
    patches = opticnerve.Patches(
        {"pixel_values": np.full((4, 48), 7, np.uint8), "image_grid_thw": np.array([1, 2, 2], np.int64)}
    )
    assert opticnerve.digest(opticnerve.Video(data)) == expected[0]
    assert opticnerve.digest(opticnerve.Frames([stills[0], png(stills[1])], 2.5, num_frames=1)) == expected[1]
    assert opticnerve.digest(patches) == expected[2]
