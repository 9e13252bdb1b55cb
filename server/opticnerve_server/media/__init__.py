"""Bytes -> RGB: the one decode contract of the server, for images and for videos."""

from . import decode, video

CONTRACT: dict[str, str] = {**decode.CONTRACT, **video.CONTRACT}
"""What becomes of unusual files, as sentences by topic."""
