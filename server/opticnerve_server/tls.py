"""Certificates: who the server is, and whose certificates its callers must show."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from .config import Config
from .settings import ConfigError
from .watched import Watched, read_file


@dataclass(frozen=True, slots=True)
class Certificates:
    """Contents of the files, PEM. `client_ca` None: callers need no certificate."""

    cert: bytes
    key: bytes
    client_ca: bytes | None


def watch_certificates(config: Config, good: Certificates | None = None) -> Watched[Certificates] | None:
    """The certificates of a configuration, None for plaintext. Raises ConfigError for files that cannot be used."""
    if not config.tls_cert:
        return None
    paths = [Path(path) for path in (config.tls_cert, config.tls_key, config.tls_client_ca) if path]
    return Watched(paths, lambda: _read(config), good)


def _read(config: Config) -> Certificates:
    client_ca = read_file("tls_client_ca", Path(config.tls_client_ca)) if config.tls_client_ca else None
    certificates = Certificates(
        read_file("tls_cert", Path(config.tls_cert)), read_file("tls_key", Path(config.tls_key)), client_ca
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A password is never asked for on the terminal: an encrypted key is refused.
        context.load_cert_chain(config.tls_cert, config.tls_key, password="")
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls_cert = {config.tls_cert} and tls_key = {config.tls_key} are no pair in PEM ({_reason(error)}): name "
            "a certificate chain, the server's own first, and its key without a password"
        ) from None
    if client_ca is not None:
        try:
            context.load_verify_locations(cadata=client_ca.decode("ascii", "replace"))
        except ssl.SSLError as error:
            raise ConfigError(
                f"tls_client_ca = {config.tls_client_ca} has no certificates in PEM ({_reason(error)}): name those of "
                "the authorities that sign callers' certificates"
            ) from None
    return certificates


def _reason(error: ssl.SSLError) -> str:
    return error.reason or str(error)
