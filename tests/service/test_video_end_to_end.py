"""Videos through the public client and a whole server: the rows that transformers makes of the same frames."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import Gemma4ImageProcessorPil, Qwen2VLImageProcessorPil

import opticnerve
from opticnerve.media import to_items
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve.v1 import encoder_pb2_grpc as pb_grpc
from oracles import load_model, media_of, official_patches, save_model
from running_server import Official, running
from video_files import LOSSLESS, WEBM, encode, picture, sound_alone, without_frames

Pictures = npt.NDArray[np.uint8]
RATE = 25


def noise(frames: int, official: Official, seed: int = 0) -> Pictures:
    """Frames [frames, height, width, 3] of 8 x 8 tokens, which no processor resizes, neither as clips nor as images."""
    shape = (frames, 16 * official.patch, 16 * official.patch, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def video(data: bytes, official: Official) -> opticnerve.Video:
    """The file, of which every frame is to be taken: Qwen2.5-VL does so, Qwen3-VL when asked for its rate."""
    return opticnerve.Video(data, fps=RATE if official.architecture == "qwen3_vl" else None)


def frames_of(pictures: Pictures, official: Official) -> opticnerve.Frames:
    """The same of a list of frames."""
    sample_fps = RATE if official.architecture == "qwen3_vl" else None
    return opticnerve.Frames(list(pictures), RATE, sample_fps=sample_fps)


def expected_rows(official: Official, *clips: Pictures) -> list[npt.NDArray[np.float32]]:
    """What transformers makes of each of these clips; a frame alone is a still."""
    model, expected = load_model(official.directory), []
    for clip in clips:
        media = media_of(clip, -(-len(clip) // 2), patch=official.patch)
        patches = official_patches(official.architecture, official.directory, media)
        features = model.get_image_features if len(clip) == 1 else model.get_video_features
        with torch.inference_mode():
            output = features(patches, torch.tensor([media.plan.grid]))
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
        expected.append(torch.cat([rows for (rows,) in levels], dim=1).numpy())
    return expected


def assert_same(found: opticnerve.Embedding, expected: npt.NDArray[np.float32], tolerance: float = 1e-5) -> None:
    assert found.array.shape == expected.shape == (found.tokens, found.width)
    assert sum(span.rows for span in found.plan.spans) == found.tokens
    difference = np.linalg.norm(found.array.astype(np.float64) - expected)
    assert difference / np.linalg.norm(expected) <= tolerance


@pytest.fixture
def client(official: Official) -> Any:
    with opticnerve.Client(official.server.address, timeout=120) as client:
        yield client


def test_odd_and_even_frames_mixed_with_images(official: Official, client: opticnerve.Client) -> None:
    clips = [noise(count, official, seed=count) for count in (2, 3, 5, 7, 8)]
    stills = [noise(1, official, seed=seed) for seed in (1, 2)]
    sources: list[Any] = [stills[0][0], *[video(encode(clip, **LOSSLESS), official) for clip in clips], stills[1][0]]
    embeddings = list(client.encode(sources, dtype="float32"))
    assert [embedding.grid.t for embedding in embeddings] == [1, 1, 2, 3, 4, 4, 1]
    order = [stills[0], *clips, stills[1]]
    for embedding, frames, expected in zip(embeddings, order, expected_rows(official, *order), strict=True):
        assert_same(embedding, expected)
        assert embedding.outcome == "replay"
        taken = range(len(frames)) if len(frames) > 1 else []
        assert embedding.plan.frame_indices == tuple(taken)
        assert len(embedding.plan.timestamps) == (embedding.grid.t if len(frames) > 1 else 0)


def test_timestamps_are_the_models_own(official: Official, client: opticnerve.Client) -> None:
    [embedding] = client.encode([frames_of(noise(5, official), official)])
    plan = embedding.plan
    if official.architecture == "qwen3_vl":  # the middle of each pair, the last of which is one frame twice
        assert plan.timestamps == pytest.approx([0.5 / RATE, 2.5 / RATE, 4 / RATE])
        assert plan.second_per_grid_ts == 0
    else:
        assert plan.timestamps == pytest.approx([0, 2 / RATE, 4 / RATE])
        assert plan.second_per_grid_ts == pytest.approx(2 / RATE)
    assert [span.timestamp for span in plan.spans] == list(plan.timestamps)


def test_a_list_of_frames_is_the_file_of_them(official: Official, client: opticnerve.Client) -> None:
    frames = noise(6, official)
    file, pixels = client.encode(
        [video(encode(frames, **LOSSLESS), official), frames_of(frames, official)], dtype="float32"
    )
    assert file.plan == pixels.plan
    assert_same(file, pixels.array, 1e-6)
    assert file.digest != pixels.digest


def resized(frames: list[Pictures], height: int, width: int) -> Pictures:
    """As the official torchvision-backed processors resize: by torch, from bytes to bytes."""
    planes = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    planes = torch.nn.functional.interpolate(planes, (height, width), mode="bicubic", antialias=True)
    return planes.permute(0, 2, 3, 1).contiguous().numpy()


@pytest.mark.parametrize("encoding", [{}, WEBM], ids=["MP4", "WebM"])
def test_real_files(official: Official, client: opticnerve.Client, encoding: dict[str, Any]) -> None:
    data = encode((picture(number, 100, 150) for number in range(9)), **encoding)
    [embedding] = client.encode([video(data, official)], dtype="float32")
    with av.open(io.BytesIO(data)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    clip = resized(frames, embedding.plan.processed_height, embedding.plan.processed_width)
    assert embedding.grid.t == 5
    assert_same(embedding, *expected_rows(official, clip))


def test_bad_files_fail_alone(official: Official, client: opticnerve.Client) -> None:
    frames = noise(4, official)
    good = frames_of(frames, official)
    bad = [
        (encode(9)[:-128], "truncated"),
        (encode(9, **WEBM)[:-128], "truncated"),
        (sound_alone(), "no video stream"),
        (without_frames(), "no frames"),
        (encode(40, container="matroska", rate=Fraction(1, 100)), "max_video_seconds"),
    ]
    first, *errors, last = client.encode(
        [good, *[opticnerve.Video(data) for data, _ in bad], good], dtype="float32", return_errors=True
    )
    for index, (error, (_, text)) in enumerate(zip(errors, bad, strict=True), start=1):
        assert isinstance(error, opticnerve.errors.ImageInvalidError), error
        assert (error.index, text in error.message) == (index, True)
    [expected] = expected_rows(official, frames)
    for embedding in (first, last):
        assert isinstance(embedding, opticnerve.Embedding)
        assert_same(embedding, expected)


def test_plans_from_sizes_are_what_encode_answers(official: Official, client: opticnerve.Client) -> None:
    random = np.random.default_rng(5)
    sizes = [
        opticnerve.VideoSize(int(frames), float(fps), int(height), int(width), sample_fps=None)
        for frames, fps, height, width in zip(
            random.integers(4, 20, 12),
            random.choice([1, 2, 5.5, 24], 12),
            *random.integers(30, 90, (2, 12)),
            strict=True,
        )
    ]
    clips = [opticnerve.Frames([np.zeros((s.height, s.width, 3), np.uint8)] * s.frames, s.fps) for s in sizes]
    assert list(client.info().modalities) == ["image", "video"]
    plans = client.plan(sizes)
    embeddings = list(client.encode(clips))
    assert plans == [embedding.plan for embedding in embeddings]
    assert [plan.tokens for plan in plans] == [len(embedding.array) for embedding in embeddings]


@pytest.mark.parametrize("narrow", [False, True])
def test_patches_of_the_official_processor(official: Official, client: opticnerve.Client, narrow: bool) -> None:
    clip = np.minimum(noise(4, official), 249)  # brighter pixels may lose a level in bfloat16
    processed = Qwen2VLImageProcessorPil.from_pretrained(official.directory)(clip[0], return_tensors="pt")
    media = media_of(clip, 2, patch=official.patch)
    values = official_patches(official.architecture, official.directory, media).numpy()
    kind = torch.bfloat16 if narrow else torch.float32
    patches = [
        opticnerve.Patches({**processed, "pixel_values": processed.pixel_values.to(kind)}),
        opticnerve.Patches(
            {
                "pixel_values_videos": values.astype(ml_dtypes.bfloat16 if narrow else np.float32),
                "video_grid_thw": np.array([media.plan.grid], np.int64),
            }
        ),
    ]
    still, moving, image, frames = client.encode([*patches, clip[0], frames_of(clip, official)], dtype="float32")
    assert (still.grid, moving.grid, moving.plan.timestamps) == (image.grid, frames.grid, ())
    assert_same(still, image.array, 1e-6)
    assert_same(moving, frames.array, 1e-6)


def test_patches_with_positions(tmp_path: Path) -> None:
    """A square of 8 x 8 tokens is what Gemma 4 makes of one, with 70 soft tokens: nothing is resized."""
    directory = tmp_path / "model"
    save_model("gemma4", directory)
    processor = Gemma4ImageProcessorPil(max_soft_tokens=70)
    processor.save_pretrained(directory)
    video = {"video_processor_type": "Gemma4VideoProcessor"}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))
    clip = np.random.default_rng(0).integers(0, 256, (3, 384, 384, 3), dtype=np.uint8)
    frames = processor(list(clip), return_tensors="pt")  # a video's patches are those of its frames
    values, positions = frames["pixel_values"], frames["image_position_ids"]
    patches = [
        opticnerve.Patches(tensors)
        for kind in (torch.float32, torch.bfloat16)
        for tensors in (
            {"pixel_values": values[:1].to(kind), "image_position_ids": positions[:1]},
            {"pixel_values_videos": values.to(kind), "video_position_ids": positions},
        )
    ]
    sources = [clip[0], opticnerve.Frames(list(clip), 2.0, num_frames=3), *patches]
    sources.append(opticnerve.Patches({"pixel_values": values[:1], "image_position_ids": positions[:1].flip(1)}))
    with (
        running(directory, tmp_path, "--token-budgets", "64,192") as server,
        opticnerve.Client(server.address, timeout=120) as client,
    ):
        image, moving, *found, broken = client.encode(sources, dtype="float32", return_errors=True)
    assert isinstance(image, opticnerve.Embedding)
    assert isinstance(moving, opticnerve.Embedding)
    assert isinstance(broken, opticnerve.errors.ImageInvalidError)
    assert "of a whole raster" in broken.message
    with torch.inference_mode():
        expected = load_model(directory).model.get_image_features(values, positions).pooler_output
    assert_same(image, expected[0].numpy())
    assert_same(moving, torch.cat(expected).numpy())
    for embedding, same in zip(found, (image, moving) * 2, strict=True):
        assert isinstance(embedding, opticnerve.Embedding), embedding
        assert (embedding.grid, embedding.tokens) == (same.grid, same.tokens)
        assert_same(embedding, same.array, 1e-6)


def anonymous_bytes(process: int) -> int:
    """Memory of a process, without what it shares with others: slots are not in it."""
    [line] = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if "RssAnon" in line]
    return int(line.split()[1]) << 10


class Peak:
    """The most memory that a process has taken in a block."""

    def __init__(self, process: int) -> None:
        self._process = process
        self.grown = 0

    def __enter__(self) -> Peak:
        self._over, self._before = threading.Event(), anonymous_bytes(self._process)
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.grown = max(self.grown, anonymous_bytes(self._process) - self._before)


async def arrivals(address: str, item: pb.Item) -> tuple[list[tuple[float, int]], pb.ItemFinished]:
    """When so many bytes of rows came, and the end."""
    import grpc.aio

    chunks = []
    async with grpc.aio.insecure_channel(address) as channel:
        async for answer in pb_grpc.EncoderServiceStub(channel).Encode(pb.EncodeRequest(items=[item])):  # type: ignore[attr-defined]
            assert not answer.HasField("failed"), answer.failed
            if answer.HasField("chunk"):
                chunks.append((time.monotonic(), len(answer.chunk.data)))
    return chunks, answer.finished


def test_a_long_clip_streams_as_it_is_computed_and_is_never_held_whole(official: Official) -> None:
    """120 frames of 1280 x 720 are 332 MB together."""
    data = encode(picture(number, 720, 1280) for number in range(120))
    [item] = to_items([video(data, official)])
    with Peak(official.server.frontends[0]) as peak:
        chunks, finished = asyncio.run(arrivals(official.server.address, item))
    assert peak.grown < 80 << 20
    parts = len(finished.dispatches)
    assert parts >= 24
    assert {dispatch.outcome for dispatch in finished.dispatches} == {pb.OUTCOME_REPLAY}
    # The first of so many parts is sent long before the last one is computed, each of which takes as long.
    one_part = finished.durations.execute.ToNanoseconds() / 1e9
    assert chunks[-1][0] - chunks[0][0] > one_part * parts / 4
    sent_early = sum(size for at, size in chunks if at < (chunks[0][0] + chunks[-1][0]) / 2)
    assert 0.1 < sent_early / sum(size for _, size in chunks) < 0.9


def test_pruning_by_content_turns_video_graphs_off(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    save_model("qwen3_vl", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"video_pruning_rate": 0.5}))
    clip = np.zeros((4, 256, 256, 3), np.uint8)
    with running(directory, tmp_path, "--token-budgets", "256") as server:
        with opticnerve.Client(server.address, timeout=120) as client:
            [image], [video] = client.encode([clip[0]]), client.encode([opticnerve.Frames(list(clip), 2.0)])
        assert (image.outcome, video.outcome, video.tokens) == ("replay", "eager", 128)
        assert len(server.events("video graphs off")) == 1
        assert server.total("opticnerve_dispatches_total", reason="disabled") == 1
