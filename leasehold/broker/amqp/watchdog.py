"""Notices a RabbitMQ node that is frozen or cut off: its connection stays open, and no byte arrives.

AMQP's heartbeats notice such a node, too, but only after three times LEASEHOLD_AMQP_HEARTBEAT. While no byte arrives,
the watchdog sends a request. Any byte counts as an answer.
"""

from __future__ import annotations

import asyncio
from time import monotonic

from aiormq.abc import AbstractChannel, AbstractConnection

from leasehold.broker.amqp.wire import Wire
from leasehold.domain.errors import BrokerUnavailable
from leasehold.runtime.gather import cancel_and_wait

#: The longest silence that is waited for, and the time after which a silence is forgotten.
_MOST_SECONDS, _FORGOTTEN_SECONDS = 10.0, 60.0


class Patience:
    """For how many seconds a node may be silent (or a channel may refuse hints): `seconds`. After it was left for that,
    twice as long each time, up to 10 s or `seconds`. So on an overloaded machine, where every node is slow, connections
    stay. The first limit returns when none was left for a minute.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._left = 0
        self._left_at = float("-inf")

    @property
    def seconds(self) -> float:
        if monotonic() - self._left_at > _FORGOTTEN_SECONDS:
            self._left = 0
        return min(self._seconds * 2.0 ** min(self._left, 10), max(_MOST_SECONDS, self._seconds))

    def record_left(self) -> None:
        """Record that a node was left because it was silent, or a channel because it refused hints."""
        self._left += 1
        self._left_at = monotonic()


async def watch(connection: AbstractConnection, wire: Wire, patience: Patience) -> None:
    """Watch the connection until RabbitMQ has sent nothing for the seconds of `patience`. Then end it, and raise
    BrokerUnavailable. After half of the seconds, send a request that a living node would answer.
    """
    probe = _Probe(connection)
    try:
        while True:
            half = patience.seconds / 2
            await asyncio.sleep(max(half - wire.silence, half / 10))
            # A node under an alarm reads nothing of a publisher that it has blocked.
            await connection.ready()
            if wire.silence >= half and not await _is_answered(probe, wire, half):
                silence = wire.silence
                patience.record_left()
                wire.abort()  # otherwise each close of a channel would wait for an answer of the node
                raise BrokerUnavailable(f"the node is silent for {silence:.1f} s (LEASEHOLD_AMQP_SILENCE_SECONDS)")
    finally:
        await probe.end()


async def _is_answered(probe: _Probe, wire: Wire, seconds: float) -> bool:
    """Send a request, and say whether any byte came within `seconds`."""
    clock = asyncio.get_running_loop().time
    requested_at = clock()
    probe.request()
    # Two waits, because all connections of a process that was stopped look silent. When it goes on, only one wait ends
    # immediately. The other one leaves time to send the request and to read its answer.
    for _ in range(2):
        await asyncio.sleep(seconds / 2)
        # The answer may have the request's own time: uvloop's clock has ticks of a millisecond. The last byte before it
        # is older by half of the patience.
        if wire.silence <= clock() - requested_at:
            return True
    return False


class _Probe:
    """Sends a request that changes nothing, on a channel of its own, one at a time."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        self._channel: AbstractChannel | None = None
        self._request: asyncio.Task[None] | None = None

    def request(self) -> None:
        """Send a request, unless the last one still waits for its answer."""
        if self._request is not None:
            if not self._request.done():
                return
            if not self._request.cancelled():
                self._request.exception()  # read it, or asyncio logs it. The link reports the end of the connection
        self._request = asyncio.create_task(self._send())

    async def end(self) -> None:
        if self._request is not None:
            await cancel_and_wait(self._request)

    async def _send(self) -> None:
        if self._channel is None or self._channel.is_closed:
            self._channel = await self._connection.channel(publisher_confirms=False)
        else:
            await self._channel.basic_qos(prefetch_count=1)
