"""The service: from a request to the stream of its answers. Each stage of the path is a call from here.

Runs on the asyncio loop of a front-end. Everything that goes wrong is raised as ServiceError, or ends an item as one.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc.aio

from opticnerve.v1 import encoder_pb2 as pb
from opticnerve.v1 import encoder_pb2_grpc as pb_grpc

from . import wire
from .activity import Activity
from .admission import Admission
from .answers import Answer
from .auth import TENANT
from .calls import Call
from .config import MAX_QUEUE_ITEMS
from .errors import ServiceError, to_item_failed
from .info import Model, ServerState, server_info
from .interceptors import REQUEST_BYTES
from .messages import Hold
from .options import Options
from .preprocess import DIGEST_BYTES, NeedBytes, Preprocessor
from .store import name_of
from .stream import CHUNK_BYTES, MAX_CHUNK_BYTES
from .types import ItemPlan

MAX_VIDEOS = 32
"""Videos in one call: each is read from end to end before it is admitted, and has a plan of up to 2048 frames."""


DEFAULT_LEASE_S = 60.0
"""How long rows are held if the caller does not say."""


class EncoderService(pb_grpc.EncoderServiceServicer):
    """The servicer. `idle` is set while no Encode is inside, nor anything that one has left to be encoded."""

    def __init__(self, state: ServerState, admission: Admission, preprocessor: Preprocessor) -> None:
        self._activity = Activity()
        self.idle = self._activity.idle
        self._state = state
        self._admission = admission
        self._preprocessor = preprocessor

    async def GetServerInfo(
        self,
        request: pb.GetServerInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetServerInfoRequest, pb.GetServerInfoResponse],
    ) -> pb.GetServerInfoResponse:
        return server_info(self._state, self._state.shown_phase)

    async def Release(
        self,
        request: pb.ReleaseRequest,
        context: grpc.aio.ServicerContext[pb.ReleaseRequest, pb.ReleaseResponse],
    ) -> pb.ReleaseResponse:
        _check_count(len(request.digests), MAX_QUEUE_ITEMS)
        for position, digest in enumerate(request.digests):
            if len(digest) != DIGEST_BYTES:
                field = f"digests[{position}]"
                raise _invalid(field, f"{field} has {len(digest)} bytes, a SHA-256 has {DIGEST_BYTES}")
        tenant = TENANT.get()
        names = [name_of(digest, tenant) for digest in request.digests]
        return pb.ReleaseResponse(released=await self._admission.end_leases(names))

    async def PlanItems(
        self,
        request: pb.PlanItemsRequest,
        context: grpc.aio.ServicerContext[pb.PlanItemsRequest, pb.PlanItemsResponse],
    ) -> pb.PlanItemsResponse:
        model, engine = self._state.require_model()
        _check_model(request.model, model)
        _check_count(len(request.items), MAX_QUEUE_ITEMS)
        _check_videos(sum(item.WhichOneof("source") == "size" and item.size.frames > 0 for item in request.items))
        plans = await self._preprocessor.plan_sizes(model.planner, request.items)
        return pb.PlanItemsResponse(
            items=[_planned_message(plan) for plan in plans],
            layout=wire.layout_message(model.planner.layout, wire.DTYPES[pb.DTYPE_UNSPECIFIED]),
            fingerprint=engine.fingerprint,
        )

    async def Encode(  # type: ignore[override]  # rows come as bytes
        self,
        request: pb.EncodeRequest,
        context: grpc.aio.ServicerContext[pb.EncodeRequest, pb.EncodeResponse],
    ) -> AsyncIterator[Answer]:
        left = context.time_remaining()
        options = self._options(request, self._state.config.default_timeout if left is None else left)
        with self._activity:
            plans = await self._preprocessor.plan_items(options.model.planner, request.items, REQUEST_BYTES.get())
            call = Call(options, plans, self._admission, self._preprocessor)
            messages = call.stream() if options.hold is None else call.hold(self._activity)
            async with aclosing(messages):
                async for message in messages:
                    yield message

    def _options(self, request: pb.EncodeRequest, time_remaining: float) -> Options:
        """Everything that can be said of a call without looking at its items. Raises ServiceError."""
        now = time.monotonic()
        model, engine = self._state.require_model()
        _check_model(request.model, model)
        if request.fingerprint not in ("", engine.fingerprint):
            raise ServiceError(
                "FINGERPRINT_MISMATCH",
                "encoder and decoder do not agree on weights, processor or layout: deploy the same model to both",
                subject=request.fingerprint,
                metadata={"expected": request.fingerprint, "fingerprint": engine.fingerprint},
            )
        _check_count(len(request.items), self._state.config.max_queue_items)
        _check_videos(sum(item.WhichOneof("media") in ("encoded_video", "frame_list") for item in request.items))
        if request.dtype not in wire.DTYPES:
            known = ", ".join(pb.Dtype.Name(number) for number in wire.DTYPES if number)  # type: ignore[arg-type]
            raise _invalid("dtype", f"dtype {request.dtype} is unknown: use one of {known}")
        if request.max_chunk_bytes > MAX_CHUNK_BYTES:
            raise _invalid(
                "max_chunk_bytes",
                f"max_chunk_bytes is {request.max_chunk_bytes}, at most {MAX_CHUNK_BYTES} is allowed: "
                "leave it at 0 for the server's choice",
            )
        return Options(
            model=model,
            fingerprint=engine.fingerprint,
            dtype=wire.DTYPES[request.dtype],
            arrived=now,
            deadline=now + time_remaining,
            tenant=TENANT.get(),
            bounds={path.name: path.capacities for path in engine.paths},
            max_chunk_bytes=request.max_chunk_bytes or CHUNK_BYTES,
            hold=self._lease(request.delivery),
            store_bytes=self._state.config.store_bytes,
            instance_id=self._state.instance_id,
            address=self._state.address,
        )

    def _lease(self, delivery: pb.Delivery) -> Hold | None:
        """The lease that a call asks for, if it asks for one. Raises ServiceError."""
        if delivery.WhichOneof("mode") != "hold":
            return None
        config, hold = self._state.config, delivery.hold
        if not config.store_bytes:
            raise _invalid("delivery", "this server keeps no rows (store_bytes is 0): use delivery.stream")
        ttl = hold.ttl.ToNanoseconds() / 1e9 if hold.HasField("ttl") else min(DEFAULT_LEASE_S, config.max_lease)
        if not 0 < ttl <= config.max_lease:
            raise _invalid(
                "delivery.hold.ttl",
                f"delivery.hold.ttl is {ttl:g} s, must be over 0 and at most {config.max_lease:g} s (max_lease)",
            )
        return Hold(ttl, hold.reads)


def _planned_message(plan: ItemPlan | NeedBytes | ServiceError) -> pb.PlannedItem:
    match plan:
        case ItemPlan():
            return pb.PlannedItem(plan=wire.plan_message(plan))
        case NeedBytes():
            return pb.PlannedItem(need_bytes=plan.count)
        case ServiceError():
            return pb.PlannedItem(failed=to_item_failed(plan))


def _check_model(name: str, model: Model) -> None:
    if name not in ("", model.name):
        raise ServiceError(
            "MODEL_NOT_LOADED",
            f"this server has the model {model.name}: ask for it, or for none in particular",
            subject=name,
            metadata={"model": model.name},
        )


def _check_count(count: int, limit: int) -> None:
    if not count:
        raise _invalid("items", "the request has no items: send at least one")
    if count > limit:
        raise ServiceError(
            "REQUEST_TOO_LARGE",
            f"the request has {count} items, the limit is {limit}: send fewer in a call",
            subject="items",
            metadata={"resource": "items", "requested": count, "limit": limit},
        )


def _check_videos(count: int) -> None:
    if count > MAX_VIDEOS:
        raise ServiceError(
            "REQUEST_TOO_LARGE",
            f"the request has {count} videos, the limit is {MAX_VIDEOS}: send fewer in a call",
            subject="items",
            metadata={"resource": "videos", "requested": count, "limit": MAX_VIDEOS},
        )


def _invalid(field: str, message: str) -> ServiceError:
    return ServiceError("REQUEST_INVALID", message, subject=field)
