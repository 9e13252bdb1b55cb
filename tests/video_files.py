"""Video files for tests, encoded on the spot: every frame shows its own number."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt

BITS = 10
"""Stripes of a frame: each is white or black, a bit of its number, the least one leftmost."""

MILLISECONDS = Fraction(1, 1000)
LOSSLESS: dict[str, Any] = {"codec": "libx264rgb", "options": {"preset": "ultrafast", "qp": "0"}, "pix_fmt": "rgb24"}
MATROSKA = {"container": "matroska"}
WEBM = {"container": "webm", "codec": "libvpx-vp9", "options": {"deadline": "realtime", "cpu-used": "8"}}


def picture(number: int, height: int = 48, width: int = 80) -> npt.NDArray[np.uint8]:
    bits = np.array([number >> bit & 1 for bit in range(BITS)], np.uint8) * 255
    row = bits[np.arange(width) * BITS // width]
    return np.broadcast_to(row[None, :, None], (height, width, 3)).copy()


def number_of(frame: npt.NDArray[np.uint8]) -> int:
    stripes = np.array_split(frame.mean(axis=(0, 2)), BITS)
    return sum(
        int(stripe[len(stripe) // 4 : -len(stripe) // 4].mean() > 127) << bit for bit, stripe in enumerate(stripes)
    )


def encode(
    pictures: Iterable[npt.NDArray[np.uint8]] | int,
    *,
    container: str = "mp4",
    codec: str = "libx264",
    rate: Fraction | int = 25,
    times: Sequence[int] | None = None,
    turned: Sequence[int] | None = None,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    **context: Any,
) -> bytes:
    """A file of `pictures`, or of so many numbered ones. `times` are in milliseconds, one a picture; `turned` is a
    display matrix; `context` are attributes of the encoder.
    """
    if isinstance(pictures, int):
        pictures = (picture(number) for number in range(pictures))
    with (
        tempfile.NamedTemporaryFile() as file,
        av.open(file.name, "w", format=container, container_options=container_options or {}) as output,
    ):
        stream: Any = None
        for index, image in enumerate(pictures):
            if stream is None:
                stream = output.add_stream(codec, rate=rate, options=options or {"preset": "ultrafast", "bf": "2"})
                stream.height, stream.width, stream.pix_fmt = *image.shape[:2], "yuv420p"
                stream.thread_count = 1
                for name, value in context.items():
                    setattr(stream.codec_context, name, value)
                if times is not None:
                    stream.codec_context.time_base = MILLISECONDS
                if turned is not None:
                    stream.set_display_matrix(turned)
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts = index if times is None else times[index]
            frame.time_base = 1 / Fraction(rate) if times is None else MILLISECONDS
            output.mux(stream.encode(frame))
        if stream is not None:
            output.mux(stream.encode())
        output.close()
        return Path(file.name).read_bytes()


def sound_alone() -> bytes:
    """An MP4 file without a video stream."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 8000
        output.mux(stream.encode(sound))
        output.mux(stream.encode())
    return file.getvalue()


def without_frames() -> bytes:
    """An MP4 file with a video stream that has none: the head of a file of fragments."""
    data = encode(5, container_options={"movflags": "frag_keyframe+empty_moov"})
    return data[: data.index(b"moof") - 4]
