"""The gRPC service that SGLang calls of an encoder where it is told to (`grpc://`), for images.

Its contract is the published one, of the package smg-grpc-proto. SGLang calls it in one of its modes alone: the request
names the receiver's port (docs/decoders/sglang.md).
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio
from smg_grpc_proto import sglang_encoder_pb2 as pb
from smg_grpc_proto import sglang_encoder_pb2_grpc as pb_grpc

from opticnerve.errors import OpticnerveError, ServerError
from opticnerve.integrations.sglang.encoder import Encoder, EncodeRequest


class Servicer(pb_grpc.SglangEncoderServicer):  # type: ignore[misc]
    """What is not here, Send of the mooncake backend, is answered with UNIMPLEMENTED."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    async def Encode(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        part = EncodeRequest(
            req_id=request.req_id,
            num_parts=request.num_parts,
            part_idx=request.part_idx,
            modality="IMAGE",
            items=list(request.mm_items),
            host=request.prefill_host,
            ports=list(request.embedding_port),
            caller=_address(context.peer()),
        )
        try:
            with self._encoder.place():
                await self._encoder.encode(part)
        except OpticnerveError as error:
            await _abort(context, error)
        return pb.EncodeResponse()

    async def SchedulerReceiveUrl(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        caller = _address(context.peer())
        try:
            await self._encoder.tell(request.req_id, request.receive_url, request.receive_count, caller)
        except OpticnerveError as error:
            await _abort(context, error)
        return pb.SchedulerReceiveUrlResponse()


def build_server(encoder: Encoder, max_request_bytes: int) -> grpc.aio.Server:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", max_request_bytes)])
    pb_grpc.add_SglangEncoderServicer_to_server(Servicer(encoder), server)
    return server


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: OpticnerveError) -> None:
    code = error.code if isinstance(error, ServerError) else "INTERNAL"
    await context.abort(grpc.StatusCode[code], str(error))


def _address(peer: str) -> str:
    """The address in gRPC's name of a peer, such as ipv6:%5B::1%5D:1234."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
