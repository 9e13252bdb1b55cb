"""Who calls: bearer tokens, and the tenant that each stands for."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path

from .config import Config
from .errors import ServiceError
from .settings import ConfigError
from .watched import Watched, read_file

TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""The tenant of the call that is being answered; empty where no tokens are asked for."""

_TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # it is logged
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # what RFC 6750 lets a bearer token consist of
MIN_TOKEN_CHARS = 16


class Tokens:
    """The tokens of a file, one `TENANT:TOKEN` a line; empty lines and lines that begin with # say nothing.

    A tenant may have several tokens, so that they can be replaced one after the other. The file is looked at in every
    call and read again when it changes; see `Watched`, also for `good`. Raises ConfigError for a file that cannot be
    used.
    """

    def __init__(self, path: Path, good: Mapping[bytes, str] | None = None) -> None:
        self._watched = Watched([path], lambda: _read(path), good)

    def known(self) -> Mapping[bytes, str]:
        """Tenants by the digests of their tokens, now."""
        self._watched.refresh()
        return self._watched.value

    def tenant_of(self, authorization: str | bytes | None) -> str:
        """The tenant of a call by its `authorization` metadata. Raises ServiceError: TOKEN_MISSING, TOKEN_INVALID."""
        text = authorization.decode("latin-1") if isinstance(authorization, bytes) else authorization or ""
        scheme, _, token = text.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise ServiceError(
                "TOKEN_MISSING", 'this server asks for a token: send metadata "authorization: Bearer TOKEN"'
            )
        given, tenant = _digest(token.strip()), None
        for known, owner in self.known().items():  # all of them, so that time tells nothing
            if hmac.compare_digest(given, known):
                tenant = owner
        if tenant is None:
            raise ServiceError("TOKEN_INVALID", "the token is none of this server's: ask its operator for a new one")
        return tenant


def watch_tokens(config: Config, good: Mapping[bytes, str] | None = None) -> Tokens | None:
    """The tokens of a configuration, None where none are asked for. Raises ConfigError for a file that is broken."""
    return Tokens(Path(config.auth_token_file), good) if config.auth_token_file else None


def _read(path: Path) -> Mapping[bytes, str]:
    """Tenants by the digests of their tokens, so that no token stays in memory and all compare in equal time."""
    setting = "auth_token_file"
    try:
        lines = read_file(setting, path).decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"{setting} = {path} is not ASCII text: write TENANT:TOKEN lines") from None
    tenants: dict[bytes, str] = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        tenant, _, token = line.partition(":")
        where = f"line {number} of {setting} = {path}"
        if not _TENANT_NAME.fullmatch(tenant) or not _TOKEN.fullmatch(token):
            raise ConfigError(
                f"{where} is not TENANT:TOKEN: a tenant has up to 64 letters, digits and ._-, a token those and ~+/="
            )
        if len(token) < MIN_TOKEN_CHARS:
            raise ConfigError(f"{where} has a token of {len(token)} characters: make it {MIN_TOKEN_CHARS} or more")
        if tenants.setdefault(_digest(token), tenant) != tenant:
            raise ConfigError(f"{where} gives the token of another tenant: every token belongs to one")
    if not tenants:
        raise ConfigError(f"{setting} = {path} has no token: write at least one TENANT:TOKEN line")
    return tenants


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("latin-1", "replace")).digest()
