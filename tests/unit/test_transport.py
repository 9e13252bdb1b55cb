"""The channel arguments of the server: gRPC ignores a name that it does not know, so names are pinned here."""

from __future__ import annotations

from opticnerve_server.config import Config
from opticnerve_server.transport import server_options


def test_options() -> None:
    assert dict(server_options(Config(model="tiny", max_request_bytes=7 << 20, max_queue_items=10))) == {
        "grpc.so_reuseport": 1,
        "grpc.max_receive_message_length": 7 << 20,
        "grpc.max_concurrent_streams": 512,
        "grpc.server.max_pending_requests": 8192,
        "grpc.server.max_pending_requests_hard_limit": 8192,
        "grpc.keepalive_time_ms": 60_000,
        "grpc.keepalive_timeout_ms": 20_000,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.min_ping_interval_without_data_ms": 10_000,
        "grpc.max_connection_age_ms": 300_000,
        "grpc.max_connection_age_grace_ms": 120_000,
    }
