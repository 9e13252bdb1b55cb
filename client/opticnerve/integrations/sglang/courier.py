"""How messages get to their receivers: over ZMQ, to a socket that pulls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import zmq
import zmq.asyncio

from opticnerve.errors import UnavailableError

SEND_S = 60.0
"""For a receiver to be connected to and take all rows."""

_POLL_S = 0.002  # between two looks whether ZMQ still needs the rows; it tells only blocked threads


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
