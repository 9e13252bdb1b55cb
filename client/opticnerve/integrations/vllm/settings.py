"""How the connector is configured."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Any, TypeAlias

from opticnerve.channel import Tls

Network: TypeAlias = "IPv4Network | IPv6Network"


@dataclass(frozen=True, slots=True)
class Settings:
    """`ec_connector_extra_config`. `of` raises ValueError for what cannot work.

    `cache_bytes` bounds the host memory for rows: those that requests still need, and behind them the last used.
    """

    server: str  # gRPC target that is asked where a request names no address
    networks: tuple[Network, ...] = ()  # in which addresses that a request names must lie
    fingerprint: str = ""  # of the tower that the decoder was made for; "" believes the uuid
    timeout_s: float = 30.0  # for one request's rows, from first sight
    cache_bytes: int = 1 << 30
    token: str = field(default="", repr=False)
    tls: Tls | None = None

    @staticmethod
    def of(extra: dict[str, Any]) -> Settings:
        """Keys are `server`, `networks`, `fingerprint`, `timeout_s`, `cache_bytes`, and the files `token_file`
        and `tls_ca`."""
        given = dict(extra)
        try:
            values: dict[str, Any] = {"server": str(given.pop("server"))}
            values["networks"] = tuple(ip_network(network) for network in given.pop("networks", []))
            converters = {"fingerprint": str, "timeout_s": float, "cache_bytes": int}
            values |= {name: convert(given.pop(name)) for name, convert in converters.items() if name in given}
            if "token_file" in given:
                values["token"] = Path(given.pop("token_file")).read_text().strip()
            if "tls_ca" in given:
                values["tls"] = Tls(given.pop("tls_ca"))
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise ValueError(f"ec_connector_extra_config: {error!r}") from error
        if given:
            raise ValueError(f"ec_connector_extra_config has no {', '.join(sorted(given))}")
        settings = Settings(**values)
        if not settings.server:
            raise ValueError("ec_connector_extra_config: server is empty, it must be a gRPC target")
        if not settings.timeout_s > 0 or settings.cache_bytes <= 0:
            raise ValueError("ec_connector_extra_config: timeout_s and cache_bytes must be over 0")
        return settings

    def address_of(self, named: object) -> str:
        """Where to fetch for a request that names this address or None. Raises ValueError for a strange one."""
        if named is None or named == self.server:
            return self.server
        host = str(named).rpartition(":")[0].strip("[]")
        try:
            address = ip_address(host)
        except ValueError:
            raise ValueError(f"address {named!r} is neither that of an IP and a port nor {self.server!r}") from None
        if not any(address in network for network in self.networks):
            raise ValueError(f"address {named!r} is in none of the networks {[str(one) for one in self.networks]}")
        return str(named)
