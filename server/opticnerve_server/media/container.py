"""What a video file is by its structure, before FFmpeg sees it.

Finds the container by its first bytes, so that FFmpeg is told which of its parsers to run and never guesses: a playlist
or a script that names other files is of no known container. Finds files that were cut off, and refuses tables whose
numbers would make a parser allocate or loop out of proportion to the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from .header import MediaError

MAX_SAMPLES = 1 << 20
"""Samples of all tracks of an MP4 file, each as often as edits may show it. FFmpeg keeps some 40 bytes for each, and a
table of any number takes no room in the file when all samples have one size."""

RAW_AUDIO = 8
"""So many samples of raw audio, a time unit long each, count as one: FFmpeg keeps them by chunks."""

MAX_BOXES = 1 << 16
"""Boxes of an MP4 file at one level."""

EBML, SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
FIRST_BOXES = {b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide"}
NESTED = {b"moov", b"mdia", b"minf", b"stbl", b"edts", b"moof", b"traf"}
NEEDED = {b"moov", b"moof", b"mdat"}
"""Boxes that a file is of no use without the last byte of. Others at the end may be anything, such as padding."""


def is_video(data: bytes) -> bool:
    """Whether a file that starts like this claims to be of a known container."""
    return data.startswith(EBML) or data[4:8] in FIRST_BOXES


def find_container(data: bytes) -> str:
    """FFmpeg's name for the container: "mp4" (also QuickTime) or "matroska" (also WebM).

    Raises MediaError for every other file, for a truncated one, and for one out of proportion.
    """
    if not data:
        raise MediaError("the video file is empty, it has no bytes: send one that has some")
    if data.startswith(EBML):
        _check_matroska(data)
        return "matroska"
    if data[4:8] in FIRST_BOXES:
        whole = _Track()
        _read_boxes(data, 0, len(data), whole)
        if whole.samples > MAX_SAMPLES:
            raise MediaError("the index of the video file is out of proportion to it: save the video anew")
        return "mp4"
    raise MediaError("the file is of none of the known containers: send MP4, QuickTime, WebM or Matroska")


def truncated() -> MediaError:
    """What to raise when the end of a file is missing."""
    return MediaError("the video file is truncated: send the whole file")


@dataclass(slots=True)
class _Track:
    """What decides how much FFmpeg keeps of a track, or of all fragments and tracks of a file."""

    samples: int = 0
    edits: int = 1
    sound: bool = False
    durations: list[int] = field(default_factory=list)  # of its samples, by runs

    @property
    def kept(self) -> int:
        """Samples, counted as MAX_SAMPLES does."""
        if self.sound and self.durations == [1]:
            return self.samples // RAW_AUDIO
        return self.samples * self.edits


def _read_boxes(data: bytes, begin: int, end: int, track: _Track) -> None:
    for kind, first, last in _boxes(data, begin, end):
        if last > end and kind in NEEDED:
            raise truncated()
        last = min(last, end)
        if kind == b"trak":
            own = _Track()
            _read_boxes(data, first, last, own)
            track.samples += own.kept
        elif kind in NESTED:
            _read_boxes(data, first, last, track)
        elif last - first >= 12:
            _read_table(data, kind, first, last, track)


def _read_table(data: bytes, kind: bytes, first: int, last: int, track: _Track) -> None:
    """How many samples one box tells of, or what FFmpeg makes of them."""
    one, two = struct.unpack_from(">II", data, first + 4)  # behind version and flags
    match kind:
        case b"hdlr":
            track.sound = data[first + 8 : first + 12] == b"soun"
        case b"stsz" | b"stz2":
            track.samples += two
        case b"trun":
            track.samples += one
        case b"elst":
            track.edits = max(track.edits, one)
        case b"stts":
            runs = range(first + 8, min(last - 8, first + 16) + 1, 8)  # two are enough to know that it is not one
            track.durations += [struct.unpack_from(">4xI", data, run)[0] for run in runs]
        case _:
            pass


def _boxes(data: bytes, begin: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Type, begin and end of the content of each box between two offsets; the end may lie beyond the second."""
    for _ in range(MAX_BOXES):
        if begin + 8 > end:
            return
        size, kind = struct.unpack_from(">I4s", data, begin)
        head = 8
        if size == 1 and begin + 16 <= end:
            size, head = struct.unpack_from(">Q", data, begin + 8)[0], 16
        elif size == 0:  # up to the end of what it is in
            size = end - begin
        if size < head:
            return
        yield kind, begin + head, begin + size
        begin += size
    raise MediaError("the video file has more boxes than any: save the video anew")


def _check_matroska(data: bytes) -> None:
    """Whether the segment, which is all of the file, is there; one of unknown size, as of a live stream, may end early.

    An element is its name, its size as a number of variable length, and so many bytes.
    """
    begin, size = _number(data, len(EBML))
    begin += size
    if begin < len(data) and not data.startswith(SEGMENT, begin):
        raise MediaError("the header of the Matroska file is damaged or out of the ordinary: save the video anew")
    begin, size = _number(data, begin + len(SEGMENT))
    if begin + size > len(data):
        raise truncated()


def _number(data: bytes, begin: int) -> tuple[int, int]:
    """Where a number of variable length ends, and its value; 0 where it says that the size is unknown."""
    length = 9 - data[begin].bit_length() if begin < len(data) else 0
    if not 1 <= length <= 8 or begin + length > len(data):
        raise truncated()
    unknown = (1 << 7 * length) - 1
    value = int.from_bytes(data[begin : begin + length], "big") & unknown
    return begin + length, 0 if value == unknown else value
