"""Video files: frame-exact content, what a probe says, refusals, and bounded memory."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest

from opticnerve_server.media.header import MediaError
from opticnerve_server.media.video import VideoHeader, VideoLimits, frames, probe
from video_files import MATROSKA, WEBM, encode, number_of, picture, sound_alone, without_frames

LIMITS = VideoLimits(max_frames=1000, max_frame_pixels=1 << 16, max_seconds=100.0)

ENCODINGS: dict[str, dict[str, Any]] = {
    "H.264 in MP4, three B-frames": {"options": {"preset": "veryfast", "bf": "3", "b-adapt": "0"}},
    "H.264 in fragmented MP4": {"container_options": {"movflags": "frag_keyframe+empty_moov"}},
    "H.264 in Matroska": MATROSKA,
    "H.264 in QuickTime, key frames alone": {"container": "mov", "options": {"g": "1", "preset": "ultrafast"}},
    "VP9 in WebM": WEBM,
    "VP8 in WebM": {"container": "webm", "codec": "libvpx", "options": {"deadline": "realtime", "cpu-used": "8"}},
    "MPEG-4 in MP4": {"codec": "mpeg4", "options": {"bf": "2"}},
}


def decoded(data: bytes, indices: list[int]) -> list[npt.NDArray[np.uint8]]:
    return list(frames(data, indices, max_frame_pixels=LIMITS.max_frame_pixels))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_exactly_the_frames_asked_for(encoding: str) -> None:
    data = encode(40, **ENCODINGS[encoding])
    assert probe(data, LIMITS) == VideoHeader(frames=40, fps=25.0, height=48, width=80)
    for indices in (list(range(40)), [0], [39], [3, 4, 17, 38], [5, 5, 5, 20, 20]):
        pictures = decoded(data, indices)
        assert [number_of(frame) for frame in pictures] == indices
        assert {(frame.shape, frame.dtype, frame.flags.c_contiguous) for frame in pictures} == {
            ((48, 80, 3), np.dtype(np.uint8), True)
        }


def test_frames_are_close_to_what_was_encoded() -> None:
    slope = np.linspace(20, 230, 80, dtype=np.uint8)[None, :, None].repeat(48, 0).repeat(3, 2)
    (frame,) = decoded(encode([slope] * 3, options={"preset": "ultrafast", "qp": "1"}), [1])
    assert np.abs(frame.astype(int) - slope).max() <= 4


@pytest.mark.parametrize("rate", [1, Fraction(25, 2), Fraction(24000, 1001), Fraction(30000, 1001), 120])
@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_rates(container: str, rate: Fraction | int) -> None:
    header = probe(encode(20, container=container, rate=rate), LIMITS)
    assert header.frames == 20
    assert header.fps == pytest.approx(float(rate), rel=1e-3)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_variable_rate_is_averaged(container: str) -> None:
    times = [0, 40, 80, 120, 600, 1300, 1310, 1320, 3000, 4500]
    data = encode(10, container=container, times=times)
    header = probe(data, LIMITS)
    assert header.frames == 10
    assert header.fps == pytest.approx(9 / 4.5, rel=0.1)
    assert [number_of(frame) for frame in decoded(data, [0, 4, 9])] == [0, 4, 9]


def corners() -> npt.NDArray[np.uint8]:
    """A different grey in every quarter of a picture that is wider than high."""
    image = np.zeros((48, 80, 3), np.uint8)
    image[:24, :40], image[:24, 40:], image[24:, :40], image[24:, 40:] = 30, 90, 160, 230
    return image


def shown(image: npt.NDArray[np.uint8], a: int, b: int, c: int, d: int) -> npt.NDArray[np.uint8]:
    """Each pixel (x, y) at (a x + c y, b x + d y), moved so that none is negative."""
    height, width = image.shape[:2]
    places = {(b * x + d * y, a * x + c * y): image[y, x] for y in range(height) for x in range(width)}
    top, left = min(y for y, _ in places), min(x for _, x in places)
    out = np.zeros((width, height, 3) if a == 0 else (height, width, 3), np.uint8)
    for (y, x), pixel in places.items():
        out[y - top, x - left] = pixel
    return out


@pytest.mark.parametrize("matrix", [(a, 0, 0, d) for a in (1, -1) for d in (1, -1)] + [
    (0, b, c, 0) for b in (1, -1) for c in (1, -1)
])  # fmt: skip
def test_the_display_matrix_is_applied(matrix: tuple[int, int, int, int]) -> None:
    a, b, c, d = (entry << 16 for entry in matrix)
    data = encode([corners()] * 2, turned=(a, b, 0, c, d, 0, 0, 0, 1 << 30))
    expected = shown(corners(), *matrix)
    header = probe(data, LIMITS)
    assert (header.height, header.width) == expected.shape[:2]
    (frame,) = decoded(data, [1])
    assert frame.shape == expected.shape
    assert np.median(np.abs(frame.astype(int) - expected)) <= 4
    middles = (slice(8, None, 16), slice(8, None, 16))
    assert np.abs(frame[middles].astype(int) - expected[middles]).max() <= 12


def test_other_matrices_are_refused() -> None:
    slanted = (46341, 46341, 0, -46341, 46341, 0, 0, 0, 1 << 30)
    refused(encode(2, turned=slanted), "at an angle")


def test_the_matrix_of_the_stream_decides_colours() -> None:
    red = np.zeros((48, 80, 3), np.uint8)
    red[..., 0] = 255
    plain, tagged = (
        decoded(encode([red] * 2, options={"preset": "ultrafast", "qp": "1"}, **tag), [0])[0]
        for tag in ({}, {"colorspace": av.video.reformatter.Colorspace.ITU709})
    )
    assert np.abs(plain.astype(int) - red).max() <= 6  # the encoder was given BT.601
    assert np.abs(tagged.astype(int) - red).max() > 20


def refused(data: bytes, match: str, limits: VideoLimits = LIMITS) -> None:
    with pytest.raises(MediaError, match=match) as caught:
        probe(data, limits)
    assert len(str(caught.value)) < 300
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("encoding", [
    {}, {"container_options": {"movflags": "faststart"}}, WEBM, MATROSKA,
    {"container_options": {"movflags": "frag_keyframe+empty_moov"}},
])  # fmt: skip
def test_truncated_files(encoding: dict[str, Any]) -> None:
    data = encode(20, **encoding)
    probe(data, LIMITS)
    end = data.index(b"mfra") - 4 if b"mfra" in data else len(data)  # an index of fragments, of no use here
    for size in [*np.linspace(40, end - 1, 40).astype(int), end - 8, end - 128]:
        refused(data[:size], "truncated|no frames|no video stream")


def test_a_file_of_fragments_that_ends_between_them_is_shorter() -> None:
    data = encode(20, options={"preset": "ultrafast", "g": "5"}, container_options={
        "movflags": "frag_keyframe+empty_moov"
    })  # fmt: skip
    third = [at for at in range(len(data)) if data.startswith(b"moof", at)][2]
    assert probe(data[: third - 4], LIMITS).frames == 10


def test_no_video_stream() -> None:
    refused(sound_alone(), "no video stream")


def test_zero_frames() -> None:
    refused(without_frames(), "no frames")


def test_limits() -> None:
    data = encode(40)
    refused(data, "more frames than the limit, 39", VideoLimits(39, 1 << 16, 100.0))
    refused(data, "48 x 80 pixels, the limit is 3839", VideoLimits(1000, 48 * 80 - 1, 100.0))
    refused(data, "lasts 1.6 s, the limit is 1.5 s", VideoLimits(1000, 1 << 16, 1.5))
    assert probe(data, VideoLimits(40, 48 * 80, 1.6)).frames == 40


def test_an_unknown_codec() -> None:
    refused(
        encode(3, container="matroska", codec="ffv1", options={"level": "3"}), "codec .* not supported|not supported"
    )


def of_two_sizes(first: int, second: int) -> bytes:
    """Three frames of one side, then three of another."""
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as output:
        stream = output.add_stream("libvpx-vp9", rate=25, options=WEBM["options"])
        stream.width = stream.height = first
        other = av.CodecContext.create("libvpx-vp9", "w")
        other.width = other.height = second
        other.options = WEBM["options"]
        for part, encoder in enumerate((stream.codec_context, other)):
            encoder.pix_fmt, encoder.time_base = "yuv420p", Fraction(1, 25)
            for index in range(3):
                frame = av.VideoFrame.from_ndarray(picture(index, encoder.height, encoder.width), format="rgb24")
                frame.pts, frame.time_base = part * 3 + index, Fraction(1, 25)
                for packet in encoder.encode(frame) + (encoder.encode() if index == 2 else []):
                    packet.stream = stream
                    output.mux(packet)
    return file.getvalue()


def test_a_change_of_size_midway() -> None:
    data = of_two_sizes(48, 64)
    assert probe(data, LIMITS) == VideoHeader(6, 25.0, 48, 48)
    assert [number_of(frame) for frame in decoded(data, [0, 2])] == [0, 2]
    with pytest.raises(MediaError, match="changes its size"):
        decoded(data, [5])


def test_a_frame_over_the_limit_midway_is_not_decoded() -> None:
    data = of_two_sizes(48, 1024)
    assert probe(data, LIMITS).frames == 6
    with pytest.raises(MediaError, match="damaged"):
        decoded(data, [5])


def test_more_frames_asked_for_than_there_are() -> None:
    iterator = frames(encode(5), [0, 5], max_frame_pixels=1 << 16)
    assert number_of(next(iterator)) == 0
    with pytest.raises(MediaError, match="ends after 5 frames"):
        next(iterator)


def test_it_can_be_stopped_early() -> None:
    iterator = frames(encode(5), [0, 1, 2], max_frame_pixels=1 << 16)
    next(iterator)
    assert isinstance(iterator, Iterator)
    iterator.close()  # type: ignore[attr-defined]
    with pytest.raises(StopIteration):
        next(iterator)
    assert decoded(encode(5), []) == []


@pytest.mark.parametrize("text", [
    "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{path}\n#EXT-X-ENDLIST\n",
    "ffconcat version 1.0\nfile '{path}'\n",
    "<?xml version='1.0'?><MPD xmlns='urn:mpeg:dash:schema:mpd:2011'><Period><BaseURL>{path}</BaseURL></Period></MPD>",
    "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=secret\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n",
    "{path}",
    "concat:{path}|{path}",
])  # fmt: skip
def test_text_that_names_other_files(text: str, tmp_path: Path) -> None:
    other = tmp_path / "secret.mp4"
    other.write_bytes(encode(3))
    payload = text.format(path=other).encode()
    refused(payload, "none of the known containers")
    # With the head of a known container it is taken for one, and FFmpeg's parser of that is the only one to see it.
    refused(b"\x00\x00\x00\x10ftypisom\x00\x00\x02\x00" + payload, "truncated|no video stream|damaged")
    refused(b"\x1a\x45\xdf\xa3\x80\x18\x53\x80\x67\xff" + payload, "truncated|no video stream|damaged|no frames")


@pytest.mark.parametrize(
    "text", ["#EXTM3U\n#EXTINF:9,\n{path}\n#EXT-X-ENDLIST\n", "ffconcat version 1.0\nfile '{path}'"]
)
def test_ffmpeg_itself_may_open_nothing_else(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if a playlist were taken for a container: neither its parser nor its files are allowed."""
    other = tmp_path / "other.mp4"
    other.write_bytes(encode(3))
    for parser in ("hls", "concat"):
        monkeypatch.setattr("opticnerve_server.media.video.find_container", lambda _, parser=parser: parser)
        refused(text.format(path=other).encode(), "supported|refers to another")


def box(kind: bytes, *parts: bytes) -> bytes:
    content = b"".join(parts)
    return struct.pack(">I4s", len(content) + 8, kind) + content


def table(kind: bytes, *numbers: int) -> bytes:
    return box(kind, bytes(4), struct.pack(f">{len(numbers)}I", *numbers))


def index_of(samples: int, *, edits: int = 1, handler: bytes = b"vide", duration: int = 1) -> bytes:
    """An MP4 file with a table of so many samples of one size, in a few hundred bytes."""
    tables = box(b"stbl", table(b"stts", 1, samples, duration), table(b"stsz", 1, samples))
    media = box(b"mdia", box(b"hdlr", bytes(8), handler, bytes(13)), box(b"minf", tables))
    return box(b"ftyp", b"isom", bytes(8)) + box(b"moov", box(b"trak", box(b"edts", table(b"elst", edits, 0)), media))


@pytest.mark.parametrize("data", [
    index_of(1 << 26),
    index_of(1 << 16, edits=1 << 10),
    index_of(1 << 26, handler=b"soun", duration=2),
    index_of(1 << 26, handler=b"soun"),
    box(b"ftyp", b"isom", bytes(8)) + box(b"moof", box(b"traf", table(b"trun", 1 << 26, 0))) * 2,
    box(b"ftyp", b"isom", bytes(8)) + box(b"free") * (1 << 17),
])  # fmt: skip
def test_an_index_out_of_proportion(data: bytes) -> None:
    refused(data, "out of proportion|more boxes")


def test_raw_audio_has_many_samples() -> None:
    refused(index_of(1 << 21, handler=b"soun"), "no video stream|supported")  # not for its index
    refused(index_of(1 << 21), "out of proportion")


@pytest.mark.parametrize("encoding", ["H.264 in MP4, three B-frames", "VP9 in WebM"])
def test_damaged_files_are_decoded_or_refused(encoding: str) -> None:
    data, random = encode(10, **ENCODINGS[encoding]), np.random.default_rng(3)
    outcomes = set()
    for _ in range(150):
        damaged = bytearray(data)
        for place in random.integers(0, len(data), 6):
            damaged[place] = random.integers(0, 256)
        try:
            header = probe(bytes(damaged), LIMITS)
            for frame in decoded(bytes(damaged), list(range(header.frames))):
                assert frame.shape[2] == 3
            outcomes.add("decoded")
        except MediaError:
            outcomes.add("refused")
    assert outcomes == {"decoded", "refused"}


@pytest.mark.parametrize("data", [b"\x1a", b"\x1a\x45\xdf\xa3", b"\0\0\0\x08ftyp", b"GIF89a" + bytes(99), bytes(99)])
def test_what_is_no_video(data: bytes) -> None:
    refused(data, "none of the known|truncated|no video|damaged")


def test_memory_is_bounded_on_a_long_clip(tmp_path: Path) -> None:
    """400 frames of 640 x 360 are 276 MB together."""
    file = tmp_path / "long.mp4"
    file.write_bytes(encode(picture(number, 360, 640) for number in range(400)))
    code = """
import json, resource, sys
from opticnerve_server.media.video import VideoLimits, frames, probe
data = open(sys.argv[1], "rb").read()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
header = probe(data, VideoLimits(1000, 1 << 20, 100.0))
total = sum(int(frame[0, 0, 0]) for frame in frames(data, range(header.frames), max_frame_pixels=1 << 20))
print(json.dumps([header.frames, total, peak() - before]))
"""
    output = subprocess.run([sys.executable, "-c", code, str(file)], check=True, capture_output=True, text=True)
    count, total, grown = json.loads(output.stdout)
    assert count == 400
    assert total == pytest.approx(255 * 200, rel=0.05)  # every second one has a white first stripe
    assert grown < 60 << 20
