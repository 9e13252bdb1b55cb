"""Which addresses rows may go to.

SGLang's requests name the host and port that receive the rows. Taken at its word, an encoder would connect to anything
that it can reach, for anyone. Rows go to the host that asks, which is where SGLang receives, or to networks that the
operator named.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from typing import TypeAlias

from opticnerve.errors import RequestInvalidError

Address: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"
Network: TypeAlias = "ipaddress.IPv4Network | ipaddress.IPv6Network"


def parse_networks(text: str) -> tuple[Network, ...]:
    """Networks as "10.0.0.0/8,fd00::/8", or none for "caller". Raises ValueError."""
    return () if text == "caller" else tuple(ipaddress.ip_network(each) for each in text.split(","))


class Gate:
    """Tells whether a caller may have rows sent to an address. `networks` are allowed to every caller."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = networks

    async def endpoint(self, receiver: str, caller: str) -> str:
        """ZMQ's name of a receiver, "host:port", that the caller, by the address it calls from, named.

        A name is resolved once, here, so that what was allowed is what is connected to. Raises RequestInvalidError.
        """
        host, _, port = receiver.rpartition(":")
        if not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise _invalid(f"{receiver} is no receiver: write host:port")
        try:
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise _invalid(f"{receiver} is no receiver: {error}") from error
        address = _plain(str(found[0][4][0]))
        if not self._allows(address, _plain(caller) if caller else None):
            raise _invalid(
                f"rows go to the host that asks for them, {caller or 'unknown'}, not to {address}: let each rank ask "
                "from the address that it receives at, or name its network in --sglang-receivers"
            )
        return f"tcp://[{address}]:{port}" if address.version == 6 else f"tcp://{address}:{port}"

    def _allows(self, address: Address, caller: Address | None) -> bool:
        if any(address in network for network in self._networks):
            return True
        return caller is not None and (address == caller or (caller.is_loopback and _is_here(address)))


def _invalid(message: str) -> RequestInvalidError:
    return RequestInvalidError(message, code="INVALID_ARGUMENT")


def _plain(text: str) -> Address:
    """The address without a zone; as IPv4 where it is one in the form of IPv6."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return (address.version == 6 and address.ipv4_mapped) or address


def _is_here(address: Address) -> bool:
    """Whether this host has it: nothing else can be bound."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return not address.is_unspecified
