"""The messages that an SGLang language server takes from its socket: a pickled head and the rows, or a head that says
what went wrong.

The head is an instance of SGLang's own `EmbeddingData`, as the release's own encoder pickles it; which modules the
release keeps its classes in is all that is known of it here. SGLang loads the head through a list of allowed globals:
numpy is not on it, and lists of numbers do for every array.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from opticnerve.integrations.sglang.pickled import Call, Global, Instance, Value, pickled
from opticnerve.tensors import Embedding

DATA = Global("sglang.srt.disaggregation.encoder.receiver", "EmbeddingData")

MODALITY_MODULES: Mapping[str, str] = {
    "0.5.23": "sglang.srt.multimodal.modality",
}
"""By release: where its `Modality` is pickled from. A release joins when the tests have run its own receiver."""


_ATTRIBUTES = ("grid_dim", "embedding", "send_time", "dtype", "shape", "error_msg", "error_code")
"""What is there beside the names of the part, if only as None."""


class Modality(enum.IntEnum):
    """SGLang's numbers."""

    IMAGE = 1
    VIDEO = 2


@dataclass(frozen=True, slots=True)
class Part:
    """What an encoder is given of one request: all its items of a modality, or a share of them."""

    req_id: str
    num_parts: int  # of the request
    part_idx: int
    modality: Modality


def embedding_frames(release: str, part: Part, embeddings: Sequence[Embedding]) -> list[bytes | memoryview]:
    """Head and rows of a part whose items have these bfloat16 embeddings of one width, in their order.

    The rows of several items are copied together; those of one stay where they are, in the embedding's memory.
    """
    rows = embeddings[0].array if len(embeddings) == 1 else np.concatenate([each.array for each in embeddings])
    state: dict[str, Value] = {
        "grid_dim": [list(each.grid) for each in embeddings],
        "dtype": Global("torch", "bfloat16"),
        "shape": list(rows.shape),
    }
    if part.modality is Modality.VIDEO:
        state |= _times(embeddings)
    return [_head(release, part, state), rows.reshape(-1).view(np.uint8).data]


def error_frames(release: str, part: Part, message: str, status: int) -> list[bytes | memoryview]:
    """The head alone, of a part that failed; `status` is that of HTTP."""
    return [_head(release, part, {"error_msg": message, "error_code": status})]


def _times(embeddings: Sequence[Embedding]) -> dict[str, Value]:
    """What SGLang lays out videos by: seconds per temporal group where the model counts so, else their times."""
    seconds = [each.plan.second_per_grid_ts for each in embeddings]
    if any(seconds):
        return {"second_per_grid_ts": seconds}
    return {"video_timestamps": [list(each.plan.timestamps) for each in embeddings]}


def _head(release: str, part: Part, state: Mapping[str, Value]) -> bytes:
    attributes: dict[str, Value] = {
        **dict.fromkeys(_ATTRIBUTES),
        "req_id": part.req_id,
        "num_parts": part.num_parts,
        "part_idx": part.part_idx,
        "modality": Call(Global(MODALITY_MODULES[release], "Modality"), int(part.modality)),
        **state,
    }
    return pickled(Instance(DATA, attributes))
