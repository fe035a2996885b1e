"""Notices a RabbitMQ node that is frozen or cut off: its connection stays open, and no byte arrives.

AMQP's heartbeats notice such a node, too, but only after three times LEASEHOLD_AMQP_HEARTBEAT. While no byte arrives,
the watchdog sends a request. Any byte counts as an answer.
"""

from __future__ import annotations

import asyncio

from aiormq.abc import AbstractChannel, AbstractConnection

from leasehold.broker.amqp.wire import Wire
from leasehold.domain.errors import BrokerUnavailable
from leasehold.runtime.gather import cancel_and_wait

#: The watchdog checks every `seconds` / _CHECKS, and sends a request after a silence of `seconds` / _REQUESTS.
_CHECKS, _REQUESTS = 4, 2


async def watch(connection: AbstractConnection, wire: Wire, seconds: float) -> None:
    """End the connection and raise BrokerUnavailable when RabbitMQ has sent nothing for `seconds`, although it got a
    request. This happens at most half of `seconds` later. Never returns.
    """
    clock = asyncio.get_running_loop().time
    request: asyncio.Task[None] | None = None
    requested_at = 0.0
    probe = _Probe(connection)
    try:
        while True:
            await asyncio.sleep(seconds / _CHECKS)
            # A node under an alarm reads nothing of a publisher that it has blocked.
            await connection.ready()
            if wire.silence < seconds / _REQUESTS:
                continue
            if request is not None and request.done() and not request.cancelled():
                request.exception()  # read it, or asyncio logs it. The link reports the end of the connection
            if request is None or request.done():
                request, requested_at = asyncio.create_task(probe.send()), clock()
            # The request must be old enough, too: if this process was stopped, all its connections look silent.
            elif wire.silence >= seconds and clock() - requested_at >= seconds / _REQUESTS:
                silence = wire.silence
                wire.abort()  # otherwise each close of a channel would wait for an answer of the node
                raise BrokerUnavailable(f"the node is silent for {silence:.1f} s (LEASEHOLD_AMQP_SILENCE_SECONDS)")
    finally:
        if request is not None:
            await cancel_and_wait(request)


class _Probe:
    """A request that changes nothing, on a channel of its own."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        self._channel: AbstractChannel | None = None

    async def send(self) -> None:
        if self._channel is None or self._channel.is_closed:
            self._channel = await self._connection.channel(publisher_confirms=False)
        else:
            await self._channel.basic_qos(prefetch_count=1)
