"""The Opticnerve client: images and videos in, the embeddings of a vision-language model's vision tower out.

    import opticnerve

    with opticnerve.Client("localhost:50051") as client:
        for embedding in client.encode(["cat.jpg", "dog.png"]):
            print(embedding.grid, embedding.array.shape, embedding.outcome)

Beside images `encode` takes `Video("clip.mp4")`, `Frames(images, fps=2)`, `Patches(processed)` and `Digest(sha256)`,
which names what the server may have encoded before. `hold` has it encode and keep. `AsyncClient` is the same for
asyncio. Errors are in `opticnerve.errors`, the wire messages in `opticnerve.v1`. This package imports neither torch nor
PIL.
"""

from opticnerve.channel import Tls
from opticnerve.client import AsyncClient
from opticnerve.errors import OpticnerveError, ProtocolError, ServerError
from opticnerve.media import (
    Digest,
    FileSource,
    Frames,
    ImageSource,
    MediaSource,
    Patches,
    SizeSource,
    Video,
    VideoSize,
    digest,
)
from opticnerve.sync import Client
from opticnerve.tensors import Dispatch, Embedding, Grid, Held, ItemPlan, Span, Timings

__all__ = [
    "AsyncClient",
    "Client",
    "Digest",
    "Dispatch",
    "Embedding",
    "FileSource",
    "Frames",
    "Grid",
    "Held",
    "ImageSource",
    "ItemPlan",
    "MediaSource",
    "OpticnerveError",
    "Patches",
    "ProtocolError",
    "ServerError",
    "SizeSource",
    "Span",
    "Timings",
    "Tls",
    "Video",
    "VideoSize",
    "digest",
]
