"""The scheduler process: every item inside the server, and which engine runs it when. No device, no torch.

One thread. It reads what front-ends, engines and supervisor have sent, enters it into the ledger (`ledger.py`), lets
ready parts join the engines' open batches (`batcher.py`), and tells front-ends what became of their items.

An engine whose process has ended is reported by the supervisor, when nothing of it can write into a slot any more. What
it had is then run by another one, each part once.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterable
from functools import partial

from . import metrics
from .balance import Imbalance
from .batcher import Batcher, Engine, QueuedPart
from .claims import Notice, Progress
from .config import Config
from .ledger import Ledger
from .messages import (
    AttachEngine,
    Computed,
    Done,
    EndLeases,
    EngineEnded,
    EngineWorks,
    Message,
    PartFailed,
    Release,
    Reserve,
    Stop,
    Submit,
)
from .peers import SUPERVISOR, Kind, Peer, Peers

log = logging.getLogger(__name__)

MESSAGES_PER_TURN = 64
"""Messages of a peer that are read before parts are assigned: what came together is seen together."""

REPORT_S = 1.0

DEVICE_FAULT = "GPU_FAULT"
EXPIRED = "EXPIRED_IN_QUEUE", "the deadline passed while the item waited for the device"
LOST = DEVICE_FAULT, "the device failed while the item was on it: retry on another server"


class SupervisorGone(RuntimeError):
    """There is nobody to work for."""


def main(config: Config, control: socket.socket) -> None:
    """Serve until told to stop."""
    Scheduler(config, control).run()


class Scheduler:
    """The state of the process; `run` is its life."""

    def __init__(self, config: Config, control: socket.socket) -> None:
        self.ledger = Ledger(
            max_items=config.max_queue_items,
            max_tokens=config.max_queue_tokens,
            max_bytes=config.max_queue_bytes,
            store_bytes=config.store_bytes,
        )
        self.batcher = Batcher(self.ledger)
        self._peers = Peers(control)
        self._busy: dict[int, float] = {}
        self._imbalance = Imbalance()
        self._stopped = False

    def run(self) -> None:
        """Returns when told to stop. Raises SupervisorGone."""
        reported = 0.0
        while not self._stopped:
            self._turn()
            if time.monotonic() - reported >= REPORT_S:
                reported = time.monotonic()
                self._report()

    def _turn(self) -> None:
        """Act on what has been said, or wait for it a while, then let batches form."""
        ready = self._peers.wait(REPORT_S / 2)
        for _ in range(MESSAGES_PER_TURN):
            for peer in ready:
                self._receive(peer)
            ready = self._peers.wait(0)
            if not ready:
                break
        self._schedule()

    def _schedule(self) -> None:
        for part in self.batcher.schedule():
            self._fail(part, *EXPIRED)

    def _receive(self, peer: Peer) -> None:
        """Read and act on one message."""
        message = self._peers.read(peer)
        match peer.kind:
            case Kind.SUPERVISOR:
                self._on_supervisor(message)
            case Kind.FRONTEND if message is None:
                self._lose_frontend(peer)
            case Kind.FRONTEND:
                self._on_frontend(peer.number, message)
            case Kind.ENGINE if message is None:
                self._peers.ignore(peer)  # the supervisor knows more; until it tells, others get what comes
                self.batcher.engines[peer.number].works = False
            case Kind.ENGINE:
                self._on_engine(peer.number, message)

    # --- supervisor

    def _on_supervisor(self, message: Message | None) -> None:
        match message:
            case None:
                raise SupervisorGone("supervisor is gone")
            case AttachEngine(device=device, ready=ready):
                send = partial(self._peers.send, Peer(Kind.ENGINE, device))
                self.batcher.engines[device] = Engine(device, {path.name: path for path in ready.paths}, send)
                self._busy.setdefault(device, 0.0)
                self._tell_ledger()
            case EngineEnded(device=device):
                self._lose_engine(device)
            case Stop():
                self._stopped = True

    def _lose_engine(self, device: int) -> None:
        """What an engine said before its end counts; what it was given and did not answer goes to others."""
        peer = Peer(Kind.ENGINE, device)
        while (message := self._peers.read(peer)) is not None:
            self._on_engine(device, message)
        self._peers.detach(peer)
        engine = self.batcher.engines[device]
        given = len(engine.running) + len(engine.open)
        failed = self.batcher.lose(device)
        self._tell_ledger()
        for part in failed:
            self._fail(part, *LOST)
        extra = {"device": device, "retried": given - len(failed), "failed": len(failed)}
        log.log(logging.WARNING if given else logging.INFO, "engine is gone", extra=extra)

    def _tell_ledger(self) -> None:
        """Tell what the full batches of all engines are made of together."""
        engines = self.batcher.engines.values()
        if not engines:
            return
        paths = [path for path in next(iter(engines)).paths.values() if path.capacities]
        tokens = sum(path.tokens_per_unit * max(c.units for c in path.capacities) for path in paths)
        items = max((c.items for path in paths for c in path.capacities), default=1)
        self.ledger.batches_hold(tokens=len(engines) * tokens, items=len(engines) * items)

    # --- front-ends

    def _on_frontend(self, frontend: int, message: Message | None) -> None:
        """Enter what a front-end says into the ledger."""
        ledger = self.ledger
        match message:
            case Reserve():
                self._tell(ledger.reserve(frontend, message))
            case Submit():
                item, notices = ledger.submit(frontend, message)
                self._tell(notices)
                if item is not None:
                    self.batcher.put(item, message.parts or [message.plan])
            case Release():
                self._tell(ledger.release(frontend, message.call, message.index, message.served))
            case EndLeases():
                self._tell(ledger.end_leases(frontend, message.call, message.names))

    def _lose_frontend(self, peer: Peer) -> None:
        self._peers.detach(peer)
        lost, notices = self.ledger.disconnect(peer.number)
        self._tell(notices)
        level = logging.WARNING if lost else logging.INFO
        log.log(level, "front-end is gone", extra={"frontend": peer.number, "items": lost})

    def _tell(self, notices: Iterable[Notice]) -> None:
        for frontend, message in notices:
            self._peers.send(Peer(Kind.FRONTEND, frontend), message)

    # --- engines

    def _on_engine(self, device: int, message: Message | None) -> None:
        engine = self.batcher.engines[device]
        match message:
            case Computed():
                self.batcher.computed(device)
                if engine.open:
                    self._schedule()  # now: whatever else has been said, the device would wait for it
            case Done():
                self._done(device, message)
            case PartFailed():
                part = engine.forget(message.number)
                if part is None or (message.reason == DEVICE_FAULT and self.batcher.again(part)):
                    return
                self._fail(part, message.reason, message.message, message.retry_after)
            case EngineWorks(works=works):
                engine.works = works

    def _done(self, device: int, message: Done) -> None:
        """Rows of a batch are in their slots."""
        for part, done in zip(self.batcher.done(device, message), message.parts, strict=True):
            progress = Progress(
                start=part.first_row,
                count=part.plan.tokens,
                dispatches=done.dispatches,
                queue_s=max(0.0, message.began_at - part.item.submitted_at),
                execute_s=message.execute_s,
                copy_s=message.copy_s,
            )
            self._tell(self.ledger.from_device(part.item, progress))
        self.ledger.computed(message.execute_s)
        self._busy[device] += message.execute_s
        metrics.DEVICE_BUSY_SECONDS.labels(str(device)).inc(message.execute_s)

    def _fail(self, part: QueuedPart, reason: str, message: str, retry_after: float | None = None) -> None:
        """End the item of a part that was to go to a device, or was there, without rows."""
        self._tell(self.ledger.fail(part.item, reason, message, retry_after))

    # --- every second

    def _report(self) -> None:
        """Gauges, and the sign of life to the supervisor, which tells the load."""
        occupancy = self.ledger.occupancy()
        metrics.QUEUE_ITEMS.set(occupancy.items)
        metrics.INFLIGHT_ITEMS.set(self.ledger.on_device)
        metrics.QUEUE_TOKENS.set(occupancy.tokens)
        metrics.QUEUE_BYTES.set(occupancy.bytes)
        store = self.ledger.store
        metrics.STORE_ITEMS.set(store.items)
        metrics.STORE_BYTES.set(store.used_bytes)
        metrics.STORE_LEASED_BYTES.set(store.leased_bytes)
        metrics.DEVICE_IMBALANCE.set(self._imbalance.update({d: self._busy[d] for d in self.batcher.engines}))
        self._peers.send(SUPERVISOR, occupancy)
