"""What the front does with a part, whichever way it was asked: encode through the service, deliver to the receivers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from opticnerve.client import AsyncClient
from opticnerve.errors import (
    OpticnerveError,
    RequestInvalidError,
    ResourceExhaustedError,
    ServerError,
    UnavailableError,
)
from opticnerve.integrations.sglang.courier import REPORT_S, SEND_S, Courier
from opticnerve.integrations.sglang.frame import Modality, Part, embedding_frames, error_frames
from opticnerve.integrations.sglang.gate import Gate
from opticnerve.integrations.sglang.media import to_sources
from opticnerve.integrations.sglang.rendezvous import Receivers, Rendezvous

MAX_PARTS = 64
"""Parts inside, each of which holds the media of one request to the service, and then their rows."""

ENCODE_S = 120.0
"""For one part, queues included: as long as the service gives a caller that names no deadline."""

HEALTH_S = 1.5
"""SGLang waits 2 s for the answer to its probe."""

_STATUSES = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """A part to encode, as it was asked for and checked by nobody yet."""

    req_id: str  # of the part, the name by which receivers know it
    num_parts: int
    part_idx: int
    modality: str
    items: Sequence[object]
    host: str = ""  # of the receiver, where `ports` are given
    ports: Sequence[int] = ()  # none: receivers tell by themselves
    caller: str = ""  # the address that asks

    def part(self) -> Part:
        """Raises RequestInvalidError."""
        if self.modality.upper() not in Modality.__members__:
            raise _invalid(f"modality {self.modality[:32]!r} is none of {', '.join(Modality.__members__)}")
        if not 0 <= self.part_idx < self.num_parts < 1 << 32:
            raise _invalid(f"part {self.part_idx} of {self.num_parts} does not exist")
        if not self.items:
            raise _invalid("the part has no items")
        if not self.req_id or not self.req_id.isprintable():  # neither is a lone surrogate
            raise _invalid("req_id is empty or not printable")
        return Part(self.req_id, self.num_parts, self.part_idx, Modality[self.modality.upper()])


def _invalid(message: str) -> RequestInvalidError:
    return RequestInvalidError(message, code="INVALID_ARGUMENT")


def status_of(error: OpticnerveError) -> int:
    """Of HTTP."""
    return _STATUSES.get(error.code, 500) if isinstance(error, ServerError) else 500


class Encoder:
    """Parts in, messages out. For one event loop; the client is the caller's."""

    def __init__(self, client: AsyncClient, release: str, gate: Gate) -> None:
        self._client = client
        self._release = release
        self._gate = gate
        self._courier = Courier()
        self._rendezvous = Rendezvous()
        self._inside = 0
        self._stopping = False
        self.idle = asyncio.Event()
        self.idle.set()

    async def tell(self, req_id: str, receiver: str, count: int, caller: str) -> None:
        """Where one of `count` receivers of a part is, as "host:port". Returns once the part is inside.

        Raises ServerError.
        """
        if count < 1:
            raise _invalid(f"receive_count is {count}, at least one rank receives")
        await self._rendezvous.tell(req_id, await self._gate.endpoint(receiver, caller), count)

    async def encode(self, request: EncodeRequest) -> None:
        """Returns once every receiver has been sent the rows. Called in a `place`.

        Raises OpticnerveError, which the receivers that are known are sent first.
        """
        part = request.part()
        try:
            if request.ports:
                await self._run(part, request.items, await self._named(request))
            else:
                async with self._rendezvous.part(part.req_id) as receivers:
                    await self._run(part, request.items, receivers)
        except OpticnerveError as error:
            _log.warning("part failed", extra={"req_id": part.req_id, "reason": str(error)})
            raise

    async def serving(self) -> bool:
        """Whether a part would be encoded now."""
        try:
            return not self._stopping and await self._client.health(timeout=HEALTH_S) == "SERVING"
        except OpticnerveError:
            return False

    def stop(self) -> None:
        """Take no more parts; `idle` is set once those inside have ended."""
        self._stopping = True

    def close(self) -> None:
        """Ends what is still being sent."""
        self._courier.close()

    async def _named(self, request: EncodeRequest) -> Receivers:
        """The receivers of a request that names them."""
        receivers, ports = Receivers(), set(request.ports)
        for port in ports:
            await receivers.tell(await self._gate.endpoint(f"{request.host}:{port}", request.caller), len(ports))
        return receivers

    async def _run(self, part: Part, items: Sequence[object], receivers: Receivers) -> None:
        try:
            sources = await asyncio.to_thread(to_sources, items, part.modality)
            embeddings = [each async for each in self._client.encode(sources, timeout=ENCODE_S)]
        except OpticnerveError as error:
            await self._report(part, receivers.endpoints, error)
            raise
        frames = embedding_frames(self._release, part, embeddings)
        async for endpoint in receivers.each():  # one by one: ZMQ sends from one thread, and SGLang needs all ranks
            await self._courier.deliver(endpoint, frames, SEND_S)

    async def _report(self, part: Part, endpoints: Sequence[str], error: OpticnerveError) -> None:
        frames = error_frames(self._release, part, str(error), status_of(error))
        reports = [self._courier.deliver(endpoint, frames, REPORT_S) for endpoint in endpoints]
        for outcome in await asyncio.gather(*reports, return_exceptions=True):
            if isinstance(outcome, UnavailableError):
                _log.warning("receiver not told", extra={"req_id": part.req_id, "reason": str(outcome)})
            elif outcome is not None:
                raise outcome

    @contextmanager
    def place(self) -> Iterator[None]:
        """Room for a part, from before its media are read. Raises ResourceExhaustedError and UnavailableError."""
        if self._stopping:
            raise UnavailableError("the front is stopping: ask another encoder", code="UNAVAILABLE")
        if self._inside >= MAX_PARTS:
            message = f"{MAX_PARTS} parts are inside: try again later, or ask another encoder"
            raise ResourceExhaustedError(message, code="RESOURCE_EXHAUSTED")
        self._inside += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self.idle.set()
