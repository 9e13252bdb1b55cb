"""What the secret files said when they were last good: a front-end that starts while one is broken begins with that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .auth import watch_tokens
from .config import Config
from .tls import Certificates, watch_certificates


@dataclass(frozen=True, slots=True)
class Credentials:
    """None where the configuration names no file, or where nothing is known of it yet. Never shown."""

    tokens: Mapping[bytes, str] | None = field(default=None, repr=False)  # tenants by the digests of their tokens
    certificates: Certificates | None = field(default=None, repr=False)


NOTHING_KNOWN = Credentials()


class CredentialFiles:
    """The files of a configuration, in the supervisor. Raises ConfigError for files that cannot be used."""

    def __init__(self, config: Config) -> None:
        self._tokens = watch_tokens(config)
        self._certificates = watch_certificates(config)

    def last_good(self) -> Credentials:
        """What is in force. To be asked often: what was good for a moment, and was not looked at, is not known."""
        tokens = None if self._tokens is None else self._tokens.known()
        if self._certificates is not None:
            self._certificates.refresh()
        return Credentials(tokens, None if self._certificates is None else self._certificates.value)
