"""The bounds of the queue, what each tenant may take of it, and whose turn is next.

Tenants share the device by start-time fair queueing (Goyal et al., 1996): a call starts, in tokens, where its tenant's
last one ends, or where the device is now if that is later, and the call that starts first goes first. Within a tenant
that is first come, first served.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

TENANT_ALPHA = 4
"""A tenant may hold this many times what is free of a resource: alone 4/5 of it, two that flood 4/9 each, and always
something is left for one that comes now (dynamic thresholds, Choudhury and Hahne, 1998)."""


class Shares:
    """Not thread-safe: the ledger's lock guards it. The tenant "" is everyone where there are no tokens: all is its."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self.limits = limits
        """By resource, as are the next."""
        self.used = Counter[str]()
        self._used_by: dict[str, Counter[str]] = defaultdict(Counter)  # tenants that have something inside
        self._virtual = 0.0
        self._finishes: dict[str, float] = {}

    def lacking(self, tenant: str, wanted: Mapping[str, int]) -> str | None:
        """The first resource of which a tenant cannot have so much now; more than the limit nobody ever can."""
        mine = self._used_by.get(tenant)
        for resource, amount in wanted.items():
            free = self.limits[resource] - self.used[resource] - amount
            if free < 0 or (tenant and mine and mine[resource] + amount > TENANT_ALPHA * free):
                return resource
        return None

    def charge(self, tenant: str, resource: str, amount: int) -> None:
        """Count in or, below zero, out."""
        self.used[resource] += amount
        mine = self._used_by[tenant]
        mine[resource] += amount
        if not any(mine.values()):
            del self._used_by[tenant]

    def start(self, tenant: str) -> float:
        """Where a call that comes now starts."""
        return max(self._virtual, self._finishes.get(tenant, 0.0))

    def queue(self, tenant: str, tokens: int) -> None:
        """A call of so many tokens has come: the tenant's next one starts behind it."""
        self._finishes[tenant] = self.start(tenant) + tokens

    def reach(self, start: float) -> None:
        """The device is at a call that starts there."""
        self._virtual = max(self._virtual, start)
