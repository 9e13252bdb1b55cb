"""From answers of the service to what a vLLM request takes: chat content parts, and the inputs of `LLM.generate`.

Two flavours. Inline: the rows travel in the request, which any vLLM with `--enable-mm-embeds` takes. By reference: the
grid and a uuid alone, for a vLLM whose `OpticnerveECConnector` fetches the rows. vLLM does not check rows of the models
served here before its engine uses them, and one wrong tensor ends its whole server process; so they are checked here.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np

from opticnerve.integrations.vllm.reference import Reference, Sampled
from opticnerve.tensors import Array, DtypeName, Embedding, Held, ItemPlan
from opticnerve.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    from torch import Tensor

Part: TypeAlias = dict[str, Any]
"""A content part of a chat message, ready for JSON."""

Modality: TypeAlias = Literal["image", "video"]

_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00}
"""Bits that are all set in what is not finite."""

GRIDS = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}
"""Architectures whose rows vLLM takes with a grid beside them. The others take pixels with a uuid."""

_TIMES = {"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}
"""Those that write the time of each frame into the prompt."""


class RowsError(ValueError):
    """Rows that must not reach a decoder."""


def is_finite(rows: Array) -> bool:
    """Whether `rows`, of any DtypeName, hold neither NaN nor infinity. Frees the interpreter while it looks."""
    mask = _EXPONENTS.get(rows.dtype.name)
    if mask is None:
        return bool(np.isfinite(rows).all())
    return not ((rows.view(np.uint16) & mask) == mask).any()


@dataclass(frozen=True, slots=True)
class Encoder:
    """What the requests to one decoder must be true to: the server that encodes for it.

    `hidden` and `deepstack_levels` are those of a row. `of` reads them off a server's `info()`.
    """

    architecture: str
    fingerprint: str
    hidden: int
    deepstack_levels: int

    @staticmethod
    def of(info: pb.GetServerInfoResponse) -> Encoder:
        """Raises ValueError for an architecture of which vLLM takes no rows in a request."""
        if info.architecture not in GRIDS:
            raise ValueError(
                f"vLLM takes no rows of {info.architecture!r} in a request, only of {', '.join(sorted(GRIDS))}: send "
                "the image as image_url with the uuid of its Reference, and serve with OpticnerveECConnector"
            )
        return Encoder(info.architecture, info.fingerprint, info.layout.hidden, info.layout.deepstack_levels)

    @property
    def width(self) -> int:
        return self.hidden * (1 + self.deepstack_levels)

    def inline(self, embedding: Embedding, sampled: Sampled = None) -> Part:
        """The content part that carries the rows, as `torch.save` writes them. Imports torch.

        Raises RowsError for rows that would end the decoder's process: of another number than the grid has tokens, of
        another width than the model's, not finite.
        """
        self._check(embedding)
        modality = modality_of(embedding.plan)
        dtype = cast(DtypeName, embedding.array.dtype.name)
        fields = {f"{modality}_embeds": _to_base64(embedding.torch()), **self._metadata(embedding.plan)}
        return self._part(modality, fields, Reference.of(embedding.digest, self.fingerprint, dtype, sampled))

    def by_reference(self, held: Held, sampled: Sampled = None, dtype: DtypeName = "bfloat16") -> Part:
        """The content part without rows: grid and uuid. `dtype` is what `hold` was called with.

        Raises RowsError for what would not fit the model.
        """
        self._check_plan(held.plan, held.hidden, held.deepstack_levels)
        return self._part(
            modality_of(held.plan),
            self._metadata(held.plan),
            Reference.of(held.digest, self.fingerprint, dtype, sampled),
        )

    def transfer_params(self, parts: Iterable[Part], held: Iterable[Held]) -> dict[str, dict[str, str]]:
        """The request's `ec_transfer_params`: by uuid, at which address the rows are. Parts and `held` in one order.

        Without it the connector asks the server that it is configured with.
        """
        return {part["uuid"]: {"address": item.address} for part, item in zip(parts, held, strict=True)}

    def _part(self, modality: Modality, fields: dict[str, Any], reference: Reference) -> Part:
        kind = f"{modality}_embeds"
        return {"type": kind, kind: fields, "uuid": reference.uuid}

    def _metadata(self, plan: ItemPlan) -> dict[str, Any]:
        """What sizes and places the rows in the prompt; vLLM takes lists for what it declares as metadata."""
        modality = modality_of(plan)
        fields: dict[str, Any] = {f"{modality}_grid_thw": list(plan.grid)}
        if modality == "video" and self.architecture in _TIMES:
            fields["timestamps"] = list(plan.timestamps)
        elif modality == "video" and plan.second_per_grid_ts:
            fields["second_per_grid_ts"] = _to_base64(_scalar(plan.second_per_grid_ts))
        return fields

    def _check(self, embedding: Embedding) -> None:
        self._check_plan(embedding.plan, embedding.hidden, len(embedding.deepstack))
        rows = embedding.array
        if rows.shape != (embedding.tokens, self.width):
            raise RowsError(
                f"rows {list(rows.shape)} for {embedding.tokens} tokens of width {self.width}: encode again"
            )
        if not is_finite(rows):
            raise RowsError(f"the rows of {embedding.digest.hex()} hold NaN or infinity: do not send them")

    def _check_plan(self, plan: ItemPlan, hidden: int, levels: int) -> None:
        grid, merge = plan.grid, plan.merge_size
        if grid.t * grid.h * grid.w != plan.tokens * merge**2 or plan.tokens == 0:
            raise RowsError(f"{plan.tokens} tokens do not cover a grid of {list(grid)} with merge size {merge}")
        if (hidden, levels) != (self.hidden, self.deepstack_levels):
            raise RowsError(
                f"rows of hidden size {hidden} with {levels} deepstack levels, the model has {self.hidden} with "
                f"{self.deepstack_levels}: the answer is of another server"
            )
        if modality_of(plan) == "video" and self.architecture in _TIMES and len(plan.timestamps) != grid.t:
            raise RowsError(
                f"{len(plan.timestamps)} timestamps for {grid.t} temporal groups: send the video as a Video or Frames, "
                "Patches do not tell its times"
            )


def modality_of(plan: ItemPlan) -> Modality:
    """Of a plan that has spans, which all have."""
    return "video" if plan.spans[0].kind == "frame" else "image"


def offline(parts: Sequence[Part]) -> dict[str, Any]:
    """`multi_modal_data` and `multi_modal_uuids` of `LLM.generate`, from content parts of one flavour. Imports torch.

    The prompt has one placeholder for each item; vLLM repeats it. An item's rows must not be sent beside references.
    """
    data: dict[str, dict[str, Any]] = {}
    uuids: dict[str, list[str]] = {}
    for part in parts:
        modality = part["type"].removesuffix("_embeds")
        for name, value in part[part["type"]].items():
            data.setdefault(modality, {}).setdefault(name, []).append(_tensor(value))
        uuids.setdefault(modality, []).append(part["uuid"])
    for modality, fields in data.items():
        for name, values in fields.items():
            if len(values) != len(uuids[modality]):
                raise ValueError(
                    f"{len(values)} of {len(uuids[modality])} {modality} parts have {name}: do not mix them"
                )
            fields[name] = _joined(name, values)
    return {"multi_modal_data": data, "multi_modal_uuids": uuids}


def _joined(name: str, values: list[Tensor]) -> Any:
    import torch

    if name == "timestamps":  # of different lengths
        return [value.tolist() for value in values]
    return torch.cat(values) if name.endswith("_embeds") else torch.stack(values)


def _tensor(value: str | list[int] | list[float]) -> Tensor:
    import torch

    if isinstance(value, str):
        loaded: Tensor = torch.load(io.BytesIO(base64.b64decode(value)), weights_only=True)
        return loaded
    return torch.tensor(value, dtype=torch.float64 if isinstance(value[0], float) else torch.int64)


def _scalar(value: float) -> Tensor:
    import torch

    return torch.tensor(value)


def _to_base64(tensor: Tensor) -> str:
    import torch

    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode("ascii")
