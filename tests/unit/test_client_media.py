"""What callers hand in, as items; the digest against its definition in the proto."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from PIL import Image

import opticnerve
from opticnerve.media import Frames, Patches, Video, VideoSize, to_items, to_media_size

RNG = np.random.default_rng(7)
COLOUR = RNG.integers(0, 256, (5, 3, 3), dtype=np.uint8)
GREY = RNG.integers(0, 256, (5, 3), dtype=np.uint8)


@pytest.mark.parametrize("convert", [str, Path])
def test_a_path_is_sent_as_the_bytes_of_its_file(tmp_path: Path, convert: Any) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"jpeg bytes")
    [item] = to_items([convert(tmp_path / "photo.jpg")])
    assert item.encoded_image.data == b"jpeg bytes"


@pytest.mark.parametrize("convert", [bytes, bytearray, memoryview])
def test_bytes_are_sent_as_they_are(convert: Any) -> None:
    [item] = to_items([convert(b"jpeg bytes")])
    assert item.encoded_image.data == b"jpeg bytes"


@pytest.mark.parametrize("source", [COLOUR, COLOUR[:, ::-1][:, ::-1], Image.fromarray(COLOUR)])
def test_colour_pixels_are_sent_row_by_row(source: Any) -> None:
    [item] = to_items([source])
    assert (item.raw_image.height, item.raw_image.width) == (5, 3)
    expected = [COLOUR[y, x, channel] for y in range(5) for x in range(3) for channel in range(3)]
    assert list(item.raw_image.data) == expected


@pytest.mark.parametrize("source", [GREY, Image.fromarray(GREY)])
def test_grey_pixels_are_sent_as_three_equal_channels(source: Any) -> None:
    [item] = to_items([source])
    assert (item.raw_image.height, item.raw_image.width) == (5, 3)
    assert list(item.raw_image.data) == [GREY[y, x] for y in range(5) for x in range(3) for _ in range(3)]


@pytest.mark.parametrize("mode", ["RGBA", "P", "LA", "CMYK", "I;16", "F", "1"])
def test_other_pil_modes_are_refused(mode: str) -> None:
    with pytest.raises(ValueError, match=f"item 1: a PIL image of mode {mode} is ambiguous: convert it to RGB or L"):
        to_items([b"x", Image.new(mode, (4, 4))])


@pytest.mark.parametrize(
    "array",
    [
        COLOUR.astype(np.float32),
        COLOUR.astype(np.int64),
        np.zeros((3, 4, 5), np.uint8),
        RNG.integers(0, 256, (4, 4, 4), dtype=np.uint8),
        np.zeros((2, 4, 4, 3), np.uint8),
        np.zeros(12, np.uint8),
        np.zeros((0, 4, 3), np.uint8),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_other_arrays_are_refused(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"item 0: an array of .* is no image: give uint8 \[height, width, 3\]"):
        to_items([array])


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="item 0: int is no image"):
        to_items([3])  # type: ignore[list-item]


@pytest.mark.parametrize("one", [
    "photo.jpg", Path("photo.jpg"), b"x", COLOUR, GREY, Image.fromarray(COLOUR), Video(b"x"),
    Frames([b"x"], 1.0), Patches({}),
])  # fmt: skip
def test_one_item_that_is_not_in_a_list_is_refused(one: Any) -> None:
    with pytest.raises(TypeError, match="items is one item; put it into a list"):
        to_items(one)


def test_the_digest_of_a_file_is_the_protos(tmp_path: Path) -> None:
    expected = hashlib.sha256(b"encoded_image" + b"\x00" + b"jpeg bytes").digest()
    (tmp_path / "photo.jpg").write_bytes(b"jpeg bytes")
    assert opticnerve.digest(b"jpeg bytes") == expected
    assert opticnerve.digest(tmp_path / "photo.jpg") == expected


def test_the_digest_of_pixels_is_the_protos() -> None:
    expected = hashlib.sha256(b"raw_image\x00" + b"\x05\x00\x00\x00" + b"\x03\x00\x00\x00" + COLOUR.tobytes()).digest()
    assert opticnerve.digest(COLOUR) == opticnerve.digest(Image.fromarray(COLOUR)) == expected
    assert opticnerve.digest(COLOUR.reshape(3, 5, 3)) != expected


def test_a_size_or_the_first_bytes_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"0123456789")
    size = to_media_size((7, 9), 4, 0)
    assert (size.size.height, size.size.width) == (7, 9)
    assert to_media_size(tmp_path / "photo.jpg", 4, 0).header == b"0123"
    assert to_media_size(b"0123456789", 20, 0).header == b"0123456789"
    with pytest.raises(TypeError, match=r"item 2: list is no size: give \(height, width\)"):
        to_media_size([7, 9], 4, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("as_path", [True, False])
def test_a_video_file_and_how_it_is_sampled(as_path: bool, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"mp4 bytes")
    source = tmp_path / "clip.mp4" if as_path else b"mp4 bytes"
    plain, sampled = to_items([Video(source), Video(source, fps=0.5, min_frames=2, max_frames=9)])
    assert plain.encoded_video.data == sampled.encoded_video.data == b"mp4 bytes"
    assert plain.encoded_video.sampling.ByteSize() == 0
    assert not sampled.encoded_video.sampling.HasField("num_frames")
    sampling = sampled.encoded_video.sampling
    assert (sampling.fps, sampling.min_frames, sampling.max_frames) == (0.5, 2, 9)


def test_frames_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"jpeg bytes")
    sources = [tmp_path / "photo.jpg", b"jpeg bytes", COLOUR, Image.fromarray(COLOUR), GREY]
    [item] = to_items([Frames(sources, 12.5, sample_fps=3, num_frames=4)])
    frames, sampling = item.frame_list.frames, item.frame_list.sampling
    assert [frame.WhichOneof("media") for frame in frames] == ["encoded_image"] * 2 + ["raw_image"] * 3
    assert frames[2].raw_image.data == frames[3].raw_image.data == COLOUR.tobytes()
    assert (item.frame_list.fps, sampling.fps, sampling.num_frames) == (12.5, 3, 4)


def test_frames_and_videos_that_are_none() -> None:
    with pytest.raises(TypeError, match="item 0: frame 1: int is no image"):
        to_items([Frames([COLOUR, 3], 1.0)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="item 1: ndarray is no video file: give a path or bytes"):
        to_items([COLOUR, Video(COLOUR)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.array([[0.5, -1.25]], np.float32), "float32"),
        (np.array([[0.5, -1.25]], ">f4"), "float32"),
        (np.array([[0.5, -1.25]], ml_dtypes.bfloat16), "bfloat16"),
        (np.array([[3, 250]], np.uint8), "uint8"),
        (torch.tensor([[0.5, -1.25]]), "float32"),
        (torch.tensor([[0.5, -1.25]], dtype=torch.bfloat16, requires_grad=True), "bfloat16"),
        (torch.tensor([[0.5, 9], [-1.25, 9]]).T[:1], "float32"),
        (torch.tensor([[3, 250]], dtype=torch.uint8), "uint8"),
    ],
)
def test_patches(values: Any, dtype: str) -> None:
    grids = [np.array([[1, 2, 2]]), torch.tensor([[1, 2, 2]])]
    for grid in grids:
        [item] = to_items([Patches({"pixel_values": values, "image_grid_thw": grid})])
        pixels, sizes = item.patches.tensors
        expected = {"uint8": bytes([3, 250]), "float32": bytes.fromhex("0000003f0000a0bf")}
        assert (pixels.name, pixels.dtype, list(pixels.shape)) == ("pixel_values", dtype, [1, 2])
        assert pixels.data == expected.get(dtype, bytes.fromhex("003fa0bf"))
        assert (sizes.name, sizes.dtype, list(sizes.shape)) == ("image_grid_thw", "int64", [1, 3])
        assert sizes.data == b"".join(bytes([n, 0, 0, 0, 0, 0, 0, 0]) for n in (1, 2, 2))


@pytest.mark.parametrize("values", [np.zeros(2, np.float64), np.zeros(2, np.int32), torch.zeros(2).half(), [1.0]])
def test_other_tensors_are_refused(values: Any) -> None:
    with pytest.raises(
        ValueError, match=r"item 0: pixel_values is of type .*: give a numpy array or a torch tensor of float32"
    ):
        to_items([Patches({"pixel_values": values})])


@pytest.mark.parametrize(
    "size",
    [
        (99999999999, 2),
        (-1, 2),
        (1.5, 2),
        (1, 2, 3),
        ("7", 9),
        VideoSize(1 << 32, 1.0, 2, 2),
        VideoSize(1, 1.0, 2, 2, 1, -1),
    ],
)
def test_what_is_no_size_is_named(size: Any) -> None:
    with pytest.raises(ValueError, match=r"item 3: .* is no size: give whole numbers from 0 to 4294967295"):
        to_media_size(size, 4, 3)


def test_the_size_of_a_video() -> None:
    size = to_media_size(VideoSize(32, 24.0, 720, 1280, sample_fps=2), 4, 0).size
    assert (size.frames, size.fps, size.height, size.width) == (32, 24.0, 720, 1280)
    assert size.sampling.fps == 2
    assert not size.sampling.HasField("max_frames")
