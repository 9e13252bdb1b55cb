"""The name that an item has inside vLLM: its uuid, from which a connector knows what to fetch.

vLLM takes a uuid as the identity of an item: of its rows in the encoder cache, and of the keys and values that the
decoder computed from them. Two items with one uuid are one item to it, so a uuid says all that rows depend on: media,
sampling, dtype, and the fingerprint of the server that encodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, cast, get_args

from opticnerve.media import Digest, Frames, Video
from opticnerve.tensors import DtypeName

_SCHEME = "opticnerve"
_DIGEST_BYTES = 32

Sampled: TypeAlias = "Video | Frames | Digest | None"
"""What was sent to the server, as far as its sampling goes; None stands for an image."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Rows of one item on a server of one fingerprint."""

    fingerprint: str
    dtype: DtypeName
    media: Digest

    @staticmethod
    def of(digest: bytes, fingerprint: str, dtype: DtypeName, sampled: Sampled = None) -> Reference:
        """The rows of media that were sent as `sampled`. A video without its sampling would not be found."""
        if sampled is None:
            return Reference(fingerprint, dtype, Digest(digest))
        fps = sampled.fps if isinstance(sampled, Video) else sampled.sample_fps
        frames = (sampled.num_frames, sampled.min_frames, sampled.max_frames)
        return Reference(fingerprint, dtype, Digest(digest, fps, *frames))

    @property
    def uuid(self) -> str:
        """ASCII, and the same for equal references: "opticnerve:FINGERPRINT:DTYPE:DIGEST:FPS:NUM:MIN:MAX"."""
        media = self.media
        sampling = (media.sample_fps, media.num_frames, media.min_frames, media.max_frames)
        words = ["" if value is None else repr(value) for value in sampling]
        return ":".join([_SCHEME, self.fingerprint, self.dtype, media.sha256.hex(), *words])

    @staticmethod
    def parse(uuid: str) -> Reference | None:
        """The reference that `uuid` names; None for one that is not ours, such as vLLM's own hashes."""
        scheme, *words = uuid.split(":")
        if scheme != _SCHEME or len(words) != 7:
            return None
        fingerprint, dtype, digest, fps, *frames = words
        try:
            sha256, rate = bytes.fromhex(digest), float(fps) if fps else None
            num_frames, min_frames, max_frames = (int(word) if word else None for word in frames)
        except ValueError:
            return None
        if dtype not in get_args(DtypeName) or len(sha256) != _DIGEST_BYTES:
            return None
        return Reference(fingerprint, cast(DtypeName, dtype), Digest(sha256, rate, num_frames, min_frames, max_frames))
