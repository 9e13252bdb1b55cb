"""What a process that answers callers knows of the server: its phase, its model, its limits, its load."""

from __future__ import annotations

from dataclasses import dataclass, field

from opticnerve.v1 import encoder_pb2 as pb

from . import __version__, wire
from .config import Config
from .errors import ServiceError
from .messages import EngineReady, Occupancy
from .models.base import Planner
from .types import Phase


@dataclass(frozen=True, slots=True)
class Model:
    """What the configuration of the model says, without weights."""

    name: str
    planner: Planner


@dataclass(slots=True, kw_only=True)
class ServerState:
    """Changed by one thread as messages arrive; others only read single fields."""

    config: Config
    instance_id: str
    address: str = ""  # at which others reach this very server
    decode_contract: dict[str, str] = field(default_factory=dict)
    phase: Phase = Phase.LOADING
    detail: str = ""
    model: Model | None = None
    ready: EngineReady | None = None
    occupancy: Occupancy = field(default_factory=lambda: Occupancy(0, 0, 0))
    stopping: bool = False  # new calls are refused; between SIGTERM and this, phase DRAINING still lets them in

    @property
    def shown_phase(self) -> Phase:
        """The phase as callers of this process see it: the engine may be ready before a young front-end is."""
        if self.phase is Phase.READY and (self.model is None or self.ready is None):
            return Phase.LOADING
        return self.phase

    def require_model(self) -> tuple[Model, EngineReady]:
        """The model and what the engine made of it; raises ServiceError when new calls are not let in."""
        if self.phase is Phase.FAILED:
            raise ServiceError("GPU_FAULT", "the device has failed and the server stops: retry on another one")
        if self.phase is Phase.UNHEALTHY:
            raise ServiceError("GPU_FAULT", "the device does not compute at present: retry on another server")
        if self.stopping:
            raise ServiceError("DRAINING", "the server finishes its last calls and stops: retry on another one")
        if self.phase is Phase.CAPTURING:
            raise ServiceError("CAPTURING_GRAPHS", f"the server is capturing graphs{self._progress}: retry later")
        if self.phase is Phase.LOADING or self.model is None or self.ready is None:
            raise ServiceError("LOADING", f"the server is loading its model{self._progress}: retry later")
        return self.model, self.ready

    @property
    def _progress(self) -> str:
        return f" ({self.detail})" if self.detail else ""


def server_info(state: ServerState, phase: Phase) -> pb.GetServerInfoResponse:
    """The answer of GetServerInfo in a phase, which is any; what is not known yet stays empty."""
    config = state.config
    info = pb.GetServerInfoResponse(
        version=__version__,
        instance_id=state.instance_id,
        phase=wire.PHASES[phase],
        phase_detail=state.detail,
        limits=pb.Limits(
            max_request_bytes=config.max_request_bytes,
            max_image_pixels=config.max_image_pixels,
            max_item_tokens=config.max_item_tokens or 0,
            max_queue_items=config.max_queue_items,
            max_queue_tokens=config.max_queue_tokens,
            max_queue_bytes=config.max_queue_bytes,
            max_video_frames=config.max_video_frames,
            max_video_seconds=config.max_video_seconds,
            store_bytes=config.store_bytes,
            max_lease_seconds=config.max_lease,
        ),
        decode_contract=state.decode_contract,
        occupancy=pb.Occupancy(items=state.occupancy.items, tokens=state.occupancy.tokens, bytes=state.occupancy.bytes),
    )
    if state.ready is not None:
        _describe_engine(info, state.ready)
        info.modalities.extend(name for name in state.ready.modalities if name in config.modalities.split(","))
    return info


def _describe_engine(info: pb.GetServerInfoResponse, ready: EngineReady) -> None:
    info.model, info.architecture, info.fingerprint = ready.model, ready.architecture, ready.fingerprint
    info.layout.CopyFrom(wire.layout_message(ready.layout, wire.DTYPES[pb.DTYPE_UNSPECIFIED]))
    info.attention_backend = ready.attention_backend
    info.device = ready.device
    info.reasons.update(ready.reasons)
    for path in ready.paths:
        info.paths.add(name=path.name, budgets=path.budgets, graph_memory_bytes=path.graph_memory_bytes)
