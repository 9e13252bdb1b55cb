"""Addresses, and the one port that several front-ends share."""

from __future__ import annotations

import socket

WILDCARDS = ("0.0.0.0", "::")  # noqa: S104


def split_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port of `host:port`."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def reserve(address: str) -> tuple[socket.socket, str]:
    """Hold a port for the front-ends, which share it: a socket that is bound but never listens, and the address.

    Port 0 becomes a free one, and stays ours while front-ends come and go. Raises OSError when another server has it.
    """
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Sockets that share a port do not see that another server shares it too; a plain one finds out.
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
    held = socket.socket(family)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((host, port))
    return held, f"{address.rpartition(':')[0]}:{held.getsockname()[1]}"


def advertised(address: str) -> str:
    """The address by which others reach a server that listens on `address`: a wildcard becomes this host's name."""
    host, port = split_address(address)
    return f"{socket.gethostname()}:{port}" if host in WILDCARDS else address


def loopback(address: str) -> str:
    """The address by which this host itself reaches a server that listens on `address`."""
    host, port = split_address(address)
    return {WILDCARDS[0]: f"127.0.0.1:{port}", WILDCARDS[1]: f"[::1]:{port}"}.get(host, address)
