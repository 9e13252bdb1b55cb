"""Who calls."""

from __future__ import annotations

from contextvars import ContextVar

TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""The tenant of the call that is being answered; empty where no tokens are asked for."""
