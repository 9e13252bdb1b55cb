"""The gRPC server of a front-end: its options, and the services that it carries."""

from __future__ import annotations

from typing import TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]
from grpc_reflection.v1alpha import reflection

from opticnerve.v1 import encoder_pb2_grpc as pb_grpc

from . import health
from .auth import watch_tokens
from .config import Config
from .credentials import NOTHING_KNOWN, Credentials
from .info import ServerState
from .interceptors import Border
from .tls import Certificates, watch_certificates
from .types import Phase

HealthServicer: TypeAlias = health_aio.HealthServicer
"""The stock servicer for asyncio, whose Watch stays open."""

MAX_STREAMS = 512
"""Calls of one connection. Those beyond are reset by gRPC and read UNAVAILABLE: admission is to be full before."""

MAX_WAITING = 8192
"""Calls that have arrived and that the event loop has not seen. From here on gRPC ends whatever arrives, on any
connection, as CANCELLED; by its default some from 1000 on, which one caller reaches that begins calls and resets them
(a reset call leaves its connection's count, not this one). One costs up to 16 KiB."""


def server_options(config: Config) -> list[tuple[str, int]]:
    """Channel arguments of the server."""
    return [
        ("grpc.so_reuseport", 1),  # the front-ends share one port
        ("grpc.max_receive_message_length", config.max_request_bytes),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.server.max_pending_requests", MAX_WAITING),
        ("grpc.server.max_pending_requests_hard_limit", MAX_WAITING),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Not "min_recv_ping_interval...", which gRPC ignores: clients may ping every 10 s.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        # A healthy client asks its name server again only when a connection ends: new servers get traffic within 5 min.
        ("grpc.max_connection_age_ms", 300_000),
        ("grpc.max_connection_age_grace_ms", 120_000),
    ]


def build_server(
    state: ServerState,
    service: pb_grpc.EncoderServiceServicer,
    health_servicer: HealthServicer,
    good: Credentials = NOTHING_KNOWN,
) -> grpc.aio.Server:
    """A server with the service, health and reflection; not bound, not started. Raises ConfigError for tokens that
    cannot be used, unless `good` ones are known.
    """
    server = grpc.aio.server(
        interceptors=[Border(state, watch_tokens(state.config, good.tokens))],
        options=server_options(state.config),
        compression=grpc.Compression.NoCompression,
    )
    pb_grpc.add_EncoderServiceServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    if state.config.reflection:
        reflection.enable_server_reflection((health.SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME), server)
    return server


def add_port(server: grpc.aio.Server, address: str, config: Config, good: Credentials = NOTHING_KNOWN) -> int:
    """Bind `address`, plaintext or TLS; the port. Raises RuntimeError when it cannot be had, ConfigError.

    New certificates are those of the connections that begin after them; a connection lasts minutes, see
    `max_connection_age_ms`.
    """
    watched = watch_certificates(config, good.certificates)
    if watched is None:
        return server.add_insecure_port(address)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Before each handshake, on a thread of gRPC."""
        return _as_grpc(watched.value) if watched.refresh() else None

    credentials = grpc.dynamic_ssl_server_credentials(
        _as_grpc(watched.value),
        changed,  # type: ignore[arg-type]  # None means no change
        require_client_authentication=bool(config.tls_client_ca),
    )
    return server.add_secure_port(address, credentials)


def _as_grpc(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key, certificates.cert)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=certificates.client_ca)


async def publish_health(health_servicer: HealthServicer, phase: Phase, started: bool) -> None:
    """Tell every Check and every open Watch; see `health.statuses`."""
    for name, status in health.statuses(phase, started).items():
        await health_servicer.set(name, status)
