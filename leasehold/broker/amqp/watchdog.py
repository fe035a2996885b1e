"""Notices a RabbitMQ node that is frozen or cut off. The connection to such a node stays open, but no byte arrives.

AMQP's heartbeats notice such a node, too, but only after three times LEASEHOLD_AMQP_HEARTBEAT. The watchdog is faster.
While no byte arrives, it sends a request. Any byte counts as an answer.
"""

from __future__ import annotations

import asyncio
from time import monotonic

from aiormq.abc import AbstractChannel, AbstractConnection

from leasehold.broker.amqp.wire import Wire
from leasehold.domain.errors import BrokerUnavailable
from leasehold.runtime.gather import cancel_and_wait

#: _MOST_SECONDS: the longest `seconds` of a `Patience`, unless its first value is longer. _FORGOTTEN_SECONDS: after
#: this time without a loss, `seconds` has its first value again. A loss is a connection or a channel that was given up
#: and replaced.
_MOST_SECONDS, _FORGOTTEN_SECONDS = 10.0, 60.0


class Patience:
    """How long (`seconds`) a node may be silent before the link, which owns the connection, replaces the connection.
    The publisher has another Patience, for channels on which RabbitMQ refuses hints (messages that tell workers of due
    tasks).

    Each replacement doubles the time, up to 10 s (or the first value, if that is longer), because on an overloaded
    machine every node is slow. After a minute without a replacement, the time is the first value again.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._losses = 0
        self._last_loss_at = float("-inf")

    @property
    def seconds(self) -> float:
        if monotonic() - self._last_loss_at > _FORGOTTEN_SECONDS:
            self._losses = 0
        return min(self._seconds * 2.0 ** min(self._losses, 10), max(_MOST_SECONDS, self._seconds))

    def record_loss(self) -> None:
        """Record that a silent connection, or a channel that refused hints, was given up."""
        self._losses += 1
        self._last_loss_at = monotonic()


async def watch(connection: AbstractConnection, wire: Wire, patience: Patience) -> None:
    """Watch the connection. When RabbitMQ has sent nothing for half of the seconds of `patience`, send a request that a
    living node would answer. If RabbitMQ sends nothing for the other half, drop the connection and raise
    BrokerUnavailable.
    """
    probe = _Probe(connection)
    try:
        while True:
            # Sleep until the silence may have lasted for half of the seconds, but at least for a tenth of this half.
            half_seconds = patience.seconds / 2
            await asyncio.sleep(max(half_seconds - wire.silence, half_seconds / 10))
            # During an alarm, wait for its end before probing. A node with an alarm reads nothing from a publisher that
            # it has blocked, so it would answer no probe.
            await connection.ready()
            if wire.silence >= half_seconds and not await _is_answered(probe, wire, half_seconds):
                silence = wire.silence
                patience.record_loss()
                wire.abort()  # otherwise each close of a channel would wait for an answer of the node
                raise BrokerUnavailable(f"the node is silent for {silence:.1f} s (LEASEHOLD_AMQP_SILENCE_SECONDS)")
    finally:
        await probe.end()


async def _is_answered(probe: _Probe, wire: Wire, seconds: float) -> bool:
    """Send a request, and return whether any byte came within `seconds`."""
    clock = asyncio.get_running_loop().time
    requested_at = clock()
    probe.request()
    # Wait twice, because this process may be stopped (as by SIGSTOP) during one of the waits. After such a stop all its
    # connections look silent, and the interrupted wait ends immediately. The other wait leaves time to send the request
    # and to read the answer.
    for _ in range(2):
        await asyncio.sleep(seconds / 2)
        # Is the last byte later than the request, or from the same tick of the clock? (uvloop's clock has ticks of a
        # millisecond.) A byte of the same tick is an answer, too, because the connection had long been silent before
        # the request.
        if wire.silence <= clock() - requested_at:
            return True
    return False


class _Probe:
    """Sends requests that change nothing, one at a time, on a separate channel."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        self._channel: AbstractChannel | None = None
        self._request: asyncio.Task[None] | None = None

    def request(self) -> None:
        """Send a request, unless the previous request still waits for its answer."""
        if self._request is not None:
            if not self._request.done():
                return
            if not self._request.cancelled():
                self._request.exception()  # read, so that asyncio does not log it; the link logs the cause
        self._request = asyncio.create_task(self._send())

    async def end(self) -> None:
        if self._request is not None:
            await cancel_and_wait(self._request)

    # The first request opens the channel. A later request sets the channel's prefetch count to the same number.
    async def _send(self) -> None:
        if self._channel is None or self._channel.is_closed:
            self._channel = await self._connection.channel(publisher_confirms=False)
        else:
            await self._channel.basic_qos(prefetch_count=1)
