"""Which addresses rows may go to, and how they get there.

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

import zmq
import zmq.asyncio

from opticnerve.errors import RequestInvalidError, UnavailableError

Address: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"
Network: TypeAlias = "ipaddress.IPv4Network | ipaddress.IPv6Network"

SEND_S = 60.0
"""For a receiver to be connected to and take all rows."""

_POLL_S = 0.002  # between two looks whether ZMQ still needs the rows; it tells only blocked threads


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
        address = _plain(found[0][4][0])
        if not self._allows(address, _plain(caller)):
            raise _invalid(
                f"rows go to the host that asks for them, {caller}, not to {address}: have each rank ask from the address "
                "that it receives at, or name its network in --sglang-receivers"
            )
        return f"tcp://[{address}]:{port}" if address.version == 6 else f"tcp://{address}:{port}"

    def _allows(self, address: Address, caller: Address) -> bool:
        if any(address in network for network in self._networks):
            return True
        return address == caller or (caller.is_loopback and _is_here(address))


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


class Courier:
    """Pushes messages to receivers. For one event loop."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()

    async def deliver(self, endpoint: str, frames: Sequence[bytes | memoryview]) -> None:
        """Returns once all of a message is with the system's sockets. Raises UnavailableError after SEND_S.

        The receiver does not say that it has it: in this direction ZMQ's pattern has no answer.
        """
        with self._context.socket(zmq.PUSH) as push:
            push.setsockopt(zmq.IMMEDIATE, 1)  # a message waits for a connection, not in a queue for one
            push.setsockopt(zmq.LINGER, 0)
            push.setsockopt(zmq.IPV6, endpoint.startswith("tcp://["))
            push.connect(endpoint)
            try:
                async with asyncio.timeout(SEND_S):
                    sent = await push.send_multipart(frames, copy=False, track=True)
                    while not sent.done:
                        await asyncio.sleep(_POLL_S)
            except TimeoutError:
                raise UnavailableError(
                    f"the receiver at {endpoint} took no rows within {SEND_S:g} s", code="UNAVAILABLE"
                ) from None
            push.setsockopt(zmq.LINGER, round(SEND_S * 1000))  # small frames are copied, and may still be in its queue

    def close(self) -> None:
        """Ends what is still being sent."""
        self._context.destroy(linger=0)
