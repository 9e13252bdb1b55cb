"""How long a call may go on, and which failures are worth sending it again."""

from __future__ import annotations

import math
import random
import time

from opticnerve.errors import QueueFullError, ServerError, UnavailableError

_MAX_RESENDS = 3
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 1.0
_JITTER = 0.25


class Patience:
    """The deadline of one call, `timeout` seconds from now, and its pauses between attempts.

    A call that ends with UNAVAILABLE is sent again at most three times. QUEUE_FULL is tried again until the deadline:
    the server that says it has done nothing yet, and names the pause. Nothing else is retried.
    """

    def __init__(self, timeout: float) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}, it must be over 0 seconds; math.inf for none")
        self.timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._resends = 0
        self._backoff = _FIRST_BACKOFF_S

    def left(self) -> float | None:
        """Seconds until the deadline, as gRPC takes them: None for no deadline."""
        return None if math.isinf(self.timeout) else max(0.0, self._deadline - time.monotonic())

    def pause(self, failure: ServerError) -> float | None:
        """Seconds to wait before the next attempt; None when there should be none."""
        if isinstance(failure, UnavailableError):
            self._resends += 1
            if self._resends > _MAX_RESENDS:
                return None
        elif not isinstance(failure, QueueFullError):
            return None
        # Callers that were refused together must not come back together.
        pause = max(self._backoff, failure.retry_after or 0.0) * (1 + random.uniform(0, _JITTER))  # noqa: S311
        self._backoff = min(2 * self._backoff, _LONGEST_BACKOFF_S)
        return pause if time.monotonic() + pause < self._deadline else None
