"""What a call asks for: the same for all its items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .errors import ServiceError
from .info import Model
from .messages import Hold, ItemRequest
from .preprocess import PlannedItem
from .store import key_of
from .stream import CHUNK_BYTES
from .types import ROW_BYTES, Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What holds for all items of a call."""

    model: Model
    fingerprint: str
    dtype: str
    arrived: float  # time.monotonic(), as is the next
    deadline: float
    tenant: str = ""
    max_chunk_bytes: int = CHUNK_BYTES
    hold: Hold | None = None
    store_bytes: int = 0
    instance_id: str = ""
    bounds: Mapping[str, Sequence[Capacity]] = field(default_factory=dict)  # of a batch, by path
    address: str = ""  # where held rows are fetched

    @property
    def row_bytes(self) -> int:
        return self.model.planner.layout.width * ROW_BYTES[self.dtype]

    def needs(self, planned: PlannedItem) -> ItemRequest:
        """What an item needs to be admitted. Raises ServiceError for one that can never be held."""
        key, plan, encoded = b"", planned.plan, planned.message.ByteSize()
        if self.store_bytes:
            key = key_of(
                planned.digest,
                self.tenant,
                fingerprint=self.fingerprint,
                sampling=planned.sampling,
                dtype=self.dtype,
            )
        if plan is None:
            return ItemRequest(0, encoded, 0, 0, key, fetch=True)
        rows = plan.tokens * self.row_bytes
        if self.hold is not None and rows > self.store_bytes:
            raise ServiceError(
                "ITEM_TOO_LARGE",
                f"the rows take {rows} bytes, the store holds {self.store_bytes} (store_bytes): stream them instead",
                metadata={"bytes": rows, "store_bytes": self.store_bytes},
            )
        return ItemRequest(plan.tokens, encoded, plan.pixel_bytes, rows, key)
