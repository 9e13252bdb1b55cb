"""How messages get to their receivers: over ZMQ, to a socket that pulls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import zmq
import zmq.asyncio

from opticnerve.errors import UnavailableError

SEND_S = 60.0
"""For a receiver to be connected to and take all rows."""

REPORT_S = 2.0
"""The same for what went wrong: the answer to the request, which says it too, waits for that."""

_POLL_S = 0.002  # between two looks whether ZMQ still needs the rows


class Courier:
    """Pushes messages to receivers. For one event loop."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()

    async def deliver(self, endpoint: str, frames: Sequence[bytes | memoryview], within: float) -> None:
        """Returns once all of a message is with the system's sockets. Raises UnavailableError after `within` seconds.

        The receiver does not say that it has it: in this direction ZMQ's pattern has no answer.
        """
        with self._context.socket(zmq.PUSH) as push:
            push.setsockopt(zmq.IMMEDIATE, 1)  # a message waits for a connection, not in a queue for one
            push.setsockopt(zmq.LINGER, 0)
            push.setsockopt(zmq.IPV6, endpoint.startswith("tcp://["))
            push.connect(endpoint)
            try:
                async with asyncio.timeout(within):
                    sent = await push.send_multipart(frames, copy=False, track=True)
                    assert sent is not None  # asked for
                    while not sent.done:  # noqa: ASYNC110 - ZMQ wakes none but a thread that is blocked for it
                        await asyncio.sleep(_POLL_S)
            except TimeoutError:
                raise UnavailableError(
                    f"the receiver at {endpoint} took nothing within {within:g} s", code="UNAVAILABLE"
                ) from None
            push.setsockopt(zmq.LINGER, round(within * 1000))  # small frames are copied, and may still be in its queue

    def close(self) -> None:
        """Ends what is still being sent."""
        self._context.destroy(linger=0)
