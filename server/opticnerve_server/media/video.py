"""Video file -> RGB frames: the decode contract of videos, on PyAV.

FFmpeg sees a file only after `container.py` has named its container, reads it from memory alone, and is allowed no
other file, address, container or codec than those of CONTRACT. It decodes on the calling thread and lets go of the
interpreter meanwhile.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import NoReturn

import av
import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.sidedata.sidedata import SideData
from av.stream import Disposition
from av.video.reformatter import VideoReformatter

from .container import find_container, truncated
from .header import MediaError

__all__ = ["CONTRACT", "VideoHeader", "VideoLimits", "frames", "probe"]

CONTRACT: dict[str, str] = {
    "video formats": "MP4, QuickTime, WebM and Matroska with H.264, HEVC, VP8, VP9, AV1 or MPEG-4 Part 2, known by "
    "their first bytes; all others are refused, and so are files that refer to others.",
    "video stream": "The first video stream that is no cover picture is taken.",
    "video frames": "Frames count from 0 in the order in which they are shown, those that an edit list hides left out; "
    "the container's own number is not believed. Time n is n divided by the average rate.",
    "video rate": "The container's average rate, unless it is off by a tenth from what the times of its frames say, "
    "which is then taken.",
    "video size": "The size of the first frame, cropped as the stream says and turned as its display matrix says, by "
    "quarter turns and mirrors; other matrices are refused, and changes of size. Pixels count as square.",
    "video colour": "YCbCr becomes RGB by the matrix that the stream names, BT.601 where it names none, from the range "
    "that it names, limited where it names none; chroma is interpolated linearly. More than 8 bits become 8. Transfer "
    "functions and primaries are not converted: HDR is not tone-mapped.",
    "video damage": "A truncated file, and one that the decoder finds corrupt, is refused; other damage decodes as it "
    "may.",
}
"""What becomes of unusual videos, as sentences by topic."""

CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4")
"""FFmpeg's names of the decoders that may run."""

RATE_TOLERANCE = 0.1
"""By how much the average rate of a container may be off."""

BUFFER_BYTES = 1 << 18
"""What FFmpeg reads of the file at a time: each read takes the interpreter."""

Frame = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """What is too much."""

    max_frames: int
    max_frame_pixels: int
    max_seconds: float


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """What a video is. `height` and `width` are those seen after the display matrix was applied."""

    frames: int
    fps: float
    height: int
    width: int


def probe(data: bytes, limits: VideoLimits) -> VideoHeader:
    """The facts of a video file; every packet is read, the first frame alone decoded. Any thread.

    Raises MediaError for what is no video, damaged, truncated, empty or over a limit.
    """
    with _opened(data, limits.max_frame_pixels) as (container, stream):
        first: av.VideoFrame | None = None
        times: list[int] = []
        for packet in container.demux(stream):
            if packet.is_corrupt:
                raise truncated()
            if first is None:
                first = next(iter(packet.decode()), None)
                if first is not None:
                    _check_size(first.height, first.width, limits.max_frame_pixels)
            if packet.size and not packet.is_discard:
                times.append(packet.pts or 0)
            if len(times) > limits.max_frames:
                raise MediaError(
                    f"the video has more frames than the limit, {limits.max_frames} (max_video_frames): "
                    "send a shorter one, or one of a lower rate"
                )
        if first is None or not times:
            raise MediaError("the video file has no frames: send one that has some")
        if len(times) < stream.frames:
            raise truncated()
        transposed, _, _ = _turn(first)
        height, width = (first.width, first.height) if transposed else (first.height, first.width)
        header = VideoHeader(len(times), _rate(stream, times), height, width)
    if header.frames / header.fps > limits.max_seconds:
        raise MediaError(
            f"the video lasts {header.frames / header.fps:.1f} s, the limit is {limits.max_seconds:g} s "
            "(max_video_seconds): send a shorter one"
        )
    return header


def frames(data: bytes, indices: Sequence[int], *, max_frame_pixels: int) -> Iterator[Frame]:
    """The frames that `indices` name, ascending, in that order: uint8 [height, width, 3], each an array of its own.

    Decodes from the first frame up to the last one asked for, and holds one at a time beside the decoder's own; close
    the iterator to stop early. Any thread, one at a time. Raises MediaError.
    """
    wanted = iter(indices)
    target = next(wanted, None)
    reformatter = VideoReformatter()
    size: tuple[int, int] | None = None
    turn = (False, False, False)
    count = 0
    with _opened(data, max_frame_pixels) as (container, stream):
        for count, frame in enumerate(container.decode(stream)):
            if size is None:
                _check_size(frame.height, frame.width, max_frame_pixels)
                # Once, and not of every frame: one whose side data was looked at is part of a reference cycle, which
                # keeps its memory until the garbage collector comes by.
                size, turn = (frame.width, frame.height), _turn(frame)
            if (frame.width, frame.height) != size:
                raise MediaError("the video changes its size midway: save it anew in one size")
            while count == target:
                yield _to_rgb(frame, reformatter, turn)
                target = next(wanted, None)
            if target is None:
                return
    if target is not None:
        raise MediaError(
            f"the video ends after {count + 1} frames, its file says that there are more: it is damaged, save it anew"
        )


@contextmanager
def _opened(data: bytes, max_frame_pixels: int) -> Iterator[tuple[InputContainer, av.VideoStream]]:
    """The file and its video stream. What goes wrong in FFmpeg becomes a MediaError."""
    name = find_container(data)
    options = {
        "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm",
        "codec_whitelist": ",".join(CODECS),
        "protocol_whitelist": "",
        "max_pixels": _decoder_limit(max_frame_pixels),
        "threads": "1",
    }
    try:
        with av.open(
            io.BytesIO(data), mode="r", format=name, options=options, buffer_size=BUFFER_BYTES, io_open=_refuse_to_open,
            metadata_errors="ignore",
        ) as container:  # fmt: skip
            yield container, _video_stream(container, max_frame_pixels)
    except (av.FFmpegError, EOFError) as error:
        raise MediaError(
            "the video file is truncated, damaged or of a kind that is not supported: send it whole, or save it anew"
        ) from error


def _refuse_to_open(*_: object) -> NoReturn:
    raise MediaError("the video file refers to another one: send all of the video in one file")


def _video_stream(container: InputContainer, max_frame_pixels: int) -> av.VideoStream:
    streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    if not streams:
        raise MediaError("the file has no video stream: send a video")
    stream = streams[0]
    context = stream.codec_context
    if context is None or context.name not in CODECS:
        raise MediaError("the codec of the video is not supported: send H.264, HEVC, VP8, VP9, AV1 or MPEG-4")
    _check_size(context.height, context.width, max_frame_pixels)
    context.options = {"max_pixels": _decoder_limit(max_frame_pixels)}
    context.thread_count = 1
    return stream


def _decoder_limit(max_frame_pixels: int) -> str:
    """What a frame may take before anything is allocated for it. FFmpeg counts sides rounded up to whole blocks."""
    return str(2 * max_frame_pixels + (1 << 16))


def _check_size(height: int, width: int, max_frame_pixels: int) -> None:
    if height * width > max_frame_pixels:
        raise MediaError(
            f"the video has {height} x {width} pixels, the limit is {max_frame_pixels} in all (max_image_pixels): "
            "send a smaller one"
        )


def _rate(stream: av.VideoStream, times: list[int]) -> float:
    """Average frames per second. `times` are those of the packets, in units of the stream."""
    stated, span = stream.average_rate, max(times) - min(times)
    measured = Fraction(len(times) - 1, span) / (stream.time_base or 1) if span and len(times) > 1 else None
    if stated and (measured is None or abs(stated / measured - 1) <= RATE_TOLERANCE):
        return float(stated)
    rate = measured or stream.guessed_rate
    if not rate:
        raise MediaError("the video file does not say how fast it is shown: save it anew")
    return float(rate)


def _turn(frame: av.VideoFrame) -> tuple[bool, bool, bool]:
    """What to do to the frame: exchange rows and columns, then reverse the rows, then the columns.

    A display matrix (a, b, _, c, d, ...), in units of 1 / 65536, shows the pixel (x, y) at (a x + c y, b x + d y).
    """
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return False, False, False
    assert isinstance(matrix, SideData)
    a, b, _, c, d = struct.unpack_from("=5i", bytes(matrix))
    if {abs(a), abs(d)} == {1 << 16} and b == c == 0:
        return False, d < 0, a < 0
    if {abs(b), abs(c)} == {1 << 16} and a == d == 0:
        return True, b < 0, c < 0
    raise MediaError("the video is to be shown at an angle or enlarged: save it upright")


def _to_rgb(frame: av.VideoFrame, reformatter: VideoReformatter, turn: tuple[bool, bool, bool]) -> Frame:
    rgb = reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
    transposed, rows, columns = turn
    if transposed:
        rgb = rgb.transpose(1, 0, 2)
    return np.ascontiguousarray(rgb[:: -1 if rows else 1, :: -1 if columns else 1])
