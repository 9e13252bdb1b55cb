"""Every port of a server: those that front-ends and SGLang's front share, and those that the supervisor answers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Self

from opticnerve.v1 import encoder_pb2 as pb

from .config import Config
from .health import HealthServer
from .ports import reserve, split_address
from .settings import ConfigError


class Listeners:
    """Holds the ports from construction until it is left.

    Attributes:
        address: of the service, port 0 resolved.
        metrics: answers /metrics.
        health: answers health and GetServerInfo, with what `info` returns, on a thread of its own.
        sglang: the addresses of the front for SGLang, by setting; empty where there is none.
    """

    def __init__(self, config: Config, info: Callable[[], pb.GetServerInfoResponse]) -> None:
        """Bind them all; raises ConfigError, and holds none, where one cannot be had.

        PROMETHEUS_MULTIPROC_DIR names a directory by now.
        """
        from .scrape import MetricsServer

        self._config = config
        with ExitStack() as held:
            name, address = "listen", config.listen
            try:
                reserved, self.address = reserve(address)
                held.callback(reserved.close)
                name, address = "metrics_listen", config.metrics_listen
                self.metrics = MetricsServer(*split_address(address))
                held.callback(self.metrics.stop)
                name, address = "health_listen", config.health_listen
                self.health = HealthServer(address, info)
                held.callback(self.health.stop)
                self.sglang: dict[str, str] = {}
                for name in ("sglang_listen", "sglang_grpc_listen"):
                    if address := getattr(config, name):
                        reserved, self.sglang[name] = reserve(address)
                        held.callback(reserved.close)
            except OSError as error:
                reason = f"cannot listen on {name} = {address}: {error}; free the address or choose another"
                raise ConfigError(reason) from error
            self._held = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    @property
    def addresses(self) -> dict[str, str]:
        """All of them by setting, resolved, for people and for programs that asked for port 0."""
        host = self._config.metrics_listen.rpartition(":")[0]
        return {
            "listen": self.address,
            "health_listen": self.health.address,
            "metrics_listen": f"{host}:{self.metrics.port}",
            **self.sglang,
        }

    def service_answers(self) -> bool:
        """Whether a front-end listens on the service's port."""
        try:
            socket.create_connection(split_address(self.address), timeout=1.0).close()
        except OSError:
            return False
        return True
