"""The metrics port, and the metrics that the supervisor itself sets.

Import this module only once PROMETHEUS_MULTIPROC_DIR names a directory: see `metrics.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import start_http_server

from . import metrics
from .messages import Device
from .types import Phase


class MetricsServer:
    """Serves the merged metrics of all processes under /metrics, from threads of its own."""

    def __init__(self, host: str, port: int) -> None:
        """Bind, port 0 for any free one; raises OSError when the address cannot be had."""
        self._server, self._thread = start_http_server(port, host, registry=metrics.merged())
        self.port = self._server.server_port

    def enter(self, phase: Phase) -> None:
        """Show the phase that the server is in."""
        for known in Phase:
            metrics.PHASE.labels(known).set(known is phase)

    def started(self, phase: Phase, seconds: float) -> None:
        """Add to the time that the start has spent in a phase."""
        metrics.STARTUP_DURATION.labels(phase).inc(seconds)

    def show(self, devices: Iterable[Device]) -> None:
        """Show which devices serve, and how often they were started anew."""
        for device in devices:
            metrics.DEVICE_UP.labels(str(device.number)).set(device.phase is Phase.READY)
            metrics.DEVICE_RESTARTS.labels(str(device.number)).set(device.restarts)

    def forget(self, pid: int) -> None:
        """Drop the gauges of a process that has ended."""
        metrics.forget_process(pid)

    def stop(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
