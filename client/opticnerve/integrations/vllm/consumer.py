"""What the scheduler of vLLM is told about each request: wait, go on, or fail. Free of vLLM."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Set
from concurrent.futures import Future
from typing import Any, Protocol

from opticnerve.integrations.vllm.items import ITEMSIZE, Asked, Item, Load, Source
from opticnerve.integrations.vllm.reference import Reference
from opticnerve.integrations.vllm.settings import Settings

_LOG = logging.getLogger("vllm.opticnerve")  # below vLLM's own logger, which is the one that is set up there


class Store(Protocol):
    """What `Fetcher` does for the scheduler. Both return at once."""

    def fetch(self, reference: Reference, address: str, rows: int, width: int) -> Future[int]: ...

    def discard(self, offset: int, nbytes: int) -> None: ...


class _UnavailableError(Exception):
    """Why a request cannot have its rows."""


class Consumer:
    """The state of every item that requests wait for. Belongs to the scheduler's thread, which it never blocks.

    A request goes on when the rows of all items ahead of it are in memory here: whatever vLLM holds or drops meanwhile,
    they can be loaded. Rows stay after their last user, least recently used first out, as far as `cache_bytes` goes.

    Args:
        settings: see there.
        width: numbers in one row of the decoder's model, deepstack levels included.
        store: fetches and lets go.
        clock: seconds.
    """

    def __init__(
        self, settings: Settings, width: int, store: Store, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._width = width
        self._store = store
        self._clock = clock
        self._items: OrderedDict[str, Item] = OrderedDict()  # the last used last
        self._bytes = 0
        self._asked: dict[str, Asked] = {}
        self._unavailable: set[str] = set()
        self._loads: dict[str, Load] = {}  # of this step

    # --- what the scheduler asks in each pass

    def ensure(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the scheduler may go on with `request`; else it asks again in its next pass.

        `request` is vLLM's: `request_id`, `mm_features`, `ec_transfer_params`.
        """
        asked = self._asked.setdefault(request.request_id, Asked())
        ahead = [one for one in request.mm_features if _end(one) > num_computed_tokens]
        self._leave(request.request_id, keep={one.identifier for one in ahead})
        if asked.failed:
            return False
        try:
            ready = self._gather(request, ahead, asked)
            self._check_patience(asked, ready)
        except _UnavailableError as why:
            _LOG.warning("request %s cannot have its rows: %s", request.request_id, why)
            self.fail(request.request_id)
            return False
        return ready

    def fail(self, request_id: str) -> None:
        """Ends a request with an error at the end of this step."""
        self._asked.setdefault(request_id, Asked()).failed = True
        self._unavailable.add(request_id)
        self._leave(request_id)

    def take_unavailable(self) -> set[str]:
        """Requests that failed since the last call."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def has(self, uuid: str) -> bool:
        """Whether the rows can be loaded in this step."""
        item = self._items.get(uuid)
        return item is not None and item.ready

    def allocated(self, uuid: str) -> None:
        """vLLM has made room for an item: the ranks load it in this step, if its rows are here."""
        item = self._items.get(uuid)
        if item is not None and item.ready and uuid not in self._loads:
            item.loading += 1
            self._loads[uuid] = Load(item.offset.result(), item.rows, self._width, item.source.reference.dtype)

    def take_loads(self) -> dict[str, Load]:
        """What the ranks load in this step, by uuid."""
        taken, self._loads = self._loads, {}
        return taken

    def loaded(self, uuids: Iterable[str]) -> None:
        """All ranks have taken over the loads of one step."""
        for uuid in uuids:
            self._items[uuid].loading -= 1

    def finished(self, request_id: str) -> None:
        """vLLM has ended the request, however it did."""
        self._leave(request_id)
        self._asked.pop(request_id, None)
        self._unavailable.discard(request_id)

    # --- how it knows

    def _gather(self, request: Any, ahead: list[Any], asked: Asked) -> bool:
        """Joins what is here, starts what is not; whether all is ready."""
        missing: dict[str, Source] = {}
        ready = True
        for one in ahead:
            uuid, rows = one.identifier, one.mm_position.get_num_embeds()
            if uuid in asked.local or self._is_inline(one, rows) or _is_foreign(one):
                self._check_rows(uuid, rows)
                continue
            try:
                self._forget_failure(uuid)
                if uuid in self._items:
                    ready &= self._join(uuid, rows, asked, request.request_id)
                elif uuid not in missing:
                    missing[uuid] = self._source(request, uuid, rows)
                elif missing[uuid].rows != rows:
                    raise _UnavailableError(f"{uuid} stands for {missing[uuid].rows} rows and for {rows} in one prompt")
            except _UnavailableError as why:
                if not _has_pixels(one):
                    raise
                _LOG.warning("request %s: vLLM encodes an item itself: %s", request.request_id, why)
                asked.local.add(uuid)
                self._leave(request.request_id, keep=asked.uses - {uuid})
        if missing:
            self._start(missing, asked, request.request_id)
        return ready and not missing

    def _is_inline(self, feature: Any, rows: int) -> bool:
        """Whether the request carries the rows. Raises for rows that would end the engine, whoever sent them."""
        elem = (feature.data or {}).get(f"{feature.modality}_embeds")
        if elem is None:
            return False
        if tuple(elem.data.shape) != (rows, self._width):
            raise _UnavailableError(f"inline rows are {list(elem.data.shape)}, they must be [{rows}, {self._width}]")
        return True

    def _check_rows(self, uuid: str, rows: int) -> None:
        if uuid in self._items and self._items[uuid].rows != rows:
            raise _UnavailableError(f"{uuid} has {self._items[uuid].rows} rows, the prompt has {rows} placeholders")

    def _join(self, uuid: str, rows: int, asked: Asked, request_id: str) -> bool:
        """Makes the request a user of an item; whether its rows are there."""
        self._check_rows(uuid, rows)
        item = self._items[uuid]
        if error := item.error:
            raise _UnavailableError(f"{uuid}: {error}")
        item.users.add(request_id)
        asked.uses.add(uuid)
        self._items.move_to_end(uuid)
        return item.ready

    def _source(self, request: Any, uuid: str, rows: int) -> Source:
        reference = Reference.parse(uuid)
        if reference is None:
            raise _UnavailableError(f"{uuid!r} is no uuid of this service")
        if self._settings.fingerprint not in ("", reference.fingerprint):
            raise _UnavailableError(f"{uuid} is of another fingerprint than the decoder's")
        params = request.ec_transfer_params
        entry = params.get(uuid) if isinstance(params, dict) else None
        try:
            address = self._settings.address_of(entry.get("address") if isinstance(entry, dict) else None)
        except ValueError as error:
            raise _UnavailableError(str(error)) from error
        return Source(reference, address, rows, rows * self._width * ITEMSIZE[reference.dtype])

    def _start(self, missing: dict[str, Source], asked: Asked, request_id: str) -> None:
        """Fetches all that is missing, or nothing: requests that held a part could wait for each other's forever."""
        nbytes = sum(source.nbytes for source in missing.values())
        if nbytes > self._settings.cache_bytes:
            raise _UnavailableError(f"{nbytes} bytes of rows, cache_bytes is {self._settings.cache_bytes}: set more")
        if not self._make_room(nbytes):
            self._leave(request_id)
            return
        for uuid, source in missing.items():
            offset = self._store.fetch(source.reference, source.address, source.rows, self._width)
            self._items[uuid] = Item(source, offset, {request_id})
            asked.uses.add(uuid)
            self._bytes += source.nbytes

    def _make_room(self, nbytes: int) -> bool:
        idle = [uuid for uuid, item in self._items.items() if item.idle]
        while self._bytes + nbytes > self._settings.cache_bytes and idle:
            self._drop(idle.pop(0))
        return self._bytes + nbytes <= self._settings.cache_bytes

    def _check_patience(self, asked: Asked, ready: bool) -> None:
        if ready:
            asked.waits_since = None
        elif asked.waits_since is None:
            asked.waits_since = self._clock()
        elif self._clock() - asked.waits_since > self._settings.timeout_s:
            raise _UnavailableError(f"no rows, or no room for them, within {self._settings.timeout_s} s")

    def _leave(self, request_id: str, keep: Set[str] = frozenset()) -> None:
        """Takes a request off the items that it has passed."""
        if request_id not in self._asked:
            return
        uses = self._asked[request_id].uses
        for uuid in uses - keep:
            uses.discard(uuid)
            self._items[uuid].users.discard(request_id)
            self._forget_failure(uuid)

    def _forget_failure(self, uuid: str) -> None:
        """A failure is told to all who waited, then the next may try anew."""
        item = self._items.get(uuid)
        if item is not None and item.error is not None and not item.users:
            self._drop(uuid)

    def _drop(self, uuid: str) -> None:
        item = self._items.pop(uuid)
        self._bytes -= item.source.nbytes
        if item.ready:
            self._store.discard(item.offset.result(), item.source.nbytes)


def _end(feature: Any) -> int:
    return int(feature.mm_position.offset + feature.mm_position.length)


def _is_foreign(feature: Any) -> bool:
    """Whether it is an ordinary item of vLLM, which has nothing to do with this service."""
    return _has_pixels(feature) and Reference.parse(feature.identifier) is None


def _has_pixels(feature: Any) -> bool:
    """Whether vLLM can encode the item itself: its data has more than the sizes that place it in the prompt."""
    return any(name.startswith("pixel_values") for name in feature.data or ())
