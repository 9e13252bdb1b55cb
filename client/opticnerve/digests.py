"""The digest of media: their name by content, the same on both sides of the wire. `ItemStarted.digest` defines it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from opticnerve.v1 import encoder_pb2 as pb

DIGEST_HEADER = "opticnerve-digest"
"""Metadata of a call for one item: its digest in hex. A proxy that hashes it sends equal items to one server."""


Metadata = tuple[tuple[str, str], ...]


def affinity_of(items: Sequence[pb.Item]) -> Metadata:
    """The metadata that names the item of a call; none where there are several, whose rows have no one place."""
    if len(items) != 1:
        return ()
    item = items[0]
    digest = item.digest.sha256 if item.WhichOneof("media") == "digest" else digest_of(item)
    return ((DIGEST_HEADER, digest.hex()),)


def digest_of(item: pb.Item) -> bytes:
    """SHA-256 of the canonical media of `item`, 32 bytes. Raises ValueError for an item without media of its own."""
    kind = item.WhichOneof("media")
    digest = hashlib.sha256(f"{kind}\0".encode("ascii"))
    match kind:
        case "encoded_image":
            digest.update(item.encoded_image.data)
        case "encoded_video":
            digest.update(item.encoded_video.data)
        case "raw_image":
            image = item.raw_image
            digest.update(struct.pack("<II", image.height, image.width))
            digest.update(image.data)
        case "frame_list":
            digest.update(struct.pack("<d", item.frame_list.fps))
            for frame in item.frame_list.frames:
                digest.update(digest_of(_as_item(frame)))
        case "patches":
            for tensor in sorted(item.patches.tensors, key=lambda tensor: tensor.name):
                digest.update(f"{tensor.name}\0{tensor.dtype}\0".encode())
                digest.update(struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape))
                digest.update(tensor.data)
        case _:
            raise ValueError("the item has no media of its own")
    return digest.digest()


def _as_item(frame: pb.Frame) -> pb.Item:
    if frame.WhichOneof("media") == "encoded_image":
        return pb.Item(encoded_image=frame.encoded_image)
    return pb.Item(raw_image=frame.raw_image)
