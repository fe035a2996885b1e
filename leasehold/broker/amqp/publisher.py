"""Publishes hints (messages that tell workers of due tasks) to RabbitMQ, with many in flight at once. The messages are
persistent and mandatory. RabbitMQ returns a mandatory message if its queue does not exist.

`publish` returns True for a hint that RabbitMQ confirmed. In every other case it returns False, and the relay sends the
hint later. The relay is a loop of each worker that reads the outbox (the table of unconfirmed hints).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import structlog
from aiormq.abc import AbstractChannel, AbstractConnection

from leasehold.broker.amqp.confirms import Confirms, Window, publish_frames
from leasehold.broker.amqp.connection import Ladder, Link, answered_within, close, until_closed, until_one_ends
from leasehold.broker.amqp.topology import RPC_SECONDS, Topology
from leasehold.broker.amqp.watchdog import Patience
from leasehold.broker.amqp.wire import Wire
from leasehold.broker.base import Hint
from leasehold.broker.envelope import encode
from leasehold.domain.errors import BrokerUnavailable
from leasehold.runtime.duty_cycle import pause_after
from leasehold.runtime.gather import cancel_and_wait
from leasehold.runtime.holding import check_nothing_held
from leasehold.settings import Settings

#: The most messages in flight at once. They are enough to hide the time of the broker's fsync, and few enough to bound
#: memory.
WINDOW = 500
#: When RabbitMQ refuses a hint, the publisher replaces the channel, if the channel has been open for at least this many
#: seconds. A replacement within a minute of the last one doubles this time, up to ten seconds. Replacements must be
#: rare, because each replacement delays the hints of all queues. RabbitMQ may refuse hints for a long time, for example
#: because somebody gave a queue a maximum length.
_REFUSED_SECONDS = 0.5
#: After a failed declare, the publisher pauses before it declares this queue again, because all hints of a batch wait
#: for the declare, for up to RPC_SECONDS. Each pause is long enough that failed declares of a queue take at most
#: _DECLARE_SHARE of the time. But no pause is longer than _MAX_DECLARE_PAUSE_SECONDS.
_DECLARE_SHARE, _MAX_DECLARE_PAUSE_SECONDS = 1 / 10, 60.0

log = structlog.get_logger(__name__)


class _Session:
    """An open channel, and the queues that were declared since it opened."""

    def __init__(
        self, connection: AbstractConnection, channel: AbstractChannel, wire: Wire, confirms: Confirms
    ) -> None:
        self.connection = connection
        self.declared_queues: set[str] = set()
        self.declare_due_at: dict[str, float] = {}  # queue whose declare failed -> when to try again
        self.opened_at = monotonic()
        self.is_given_up = asyncio.Event()  # when it is set, the publisher replaces the channel
        self._channel = channel
        self._wire = wire
        self._confirms = confirms

    def encode(self, queue: str, hint: Hint) -> _Message | None:
        """The hint's message. Returns None, and logs a warning, when JSON or AMQP cannot encode the hint."""
        try:
            body = encode(hint)
            return _Message(queue, body, publish_frames(self._channel.number, queue, hint.headers, body))
        except (TypeError, ValueError) as error:  # orjson raises TypeErrors
            log.warning("hint cannot be sent", queue=queue, reason=str(error))
            return None

    def abort(self) -> None:
        """Drop the connection without waiting for the broker."""
        self._wire.abort()

    def send(self, messages: Sequence[_Message]) -> Window:
        """Write all messages in one write. Raises BrokerUnavailable."""
        if self._channel.is_closed:
            raise BrokerUnavailable("the channel closed")
        self._wire.write(b"".join(message.frames for message in messages))
        return self._confirms.sent([(message.queue, message.body) for message in messages])


@dataclass(frozen=True, slots=True)
class _Message:
    """An encoded hint. `queue`: the queue's name on the broker. `frames`: the AMQP frames that publish `body`."""

    queue: str
    body: bytes
    frames: bytes


class Publisher:
    """One connection to RabbitMQ with one channel that publishes."""

    def __init__(self, settings: Settings, topology: Topology) -> None:
        self._timeout = settings.amqp_publish_timeout
        self._topology = topology
        self._session: _Session | None = None
        # How long a channel must have been open before it is replaced. Each `record_loss` doubles this time.
        self._patience_with_refusals = Patience(_REFUSED_SECONDS)
        self.link = Link(settings, "publish", self._serve)  # connects, and runs `_serve` with each connection
        self.unroutable = 0  # how many messages RabbitMQ has returned

    @property
    def ready(self) -> bool:
        return self._session is not None

    async def publish(self, hints: Sequence[Hint]) -> list[bool]:
        """For each hint, whether the broker confirmed it. Raises no error except CancelledError, when the caller's
        asyncio task is cancelled.
        """
        check_nothing_held("the broker")  # the broker may be slow, so the caller must hold no database connection
        confirmed: list[bool] = []
        for start in range(0, len(hints), WINDOW):
            confirmed += await self._publish_window(hints[start : start + WINDOW])
        return confirmed

    async def _publish_window(self, hints: Sequence[Hint]) -> list[bool]:
        # Declare the queues that were not declared on this channel yet. Then send the hints whose queues are declared,
        # and wait for the confirms.
        session = self._session
        if session is None:
            return [False] * len(hints)
        names = [self._topology.name_of(hint.queue, hint.band) for hint in hints]
        try:
            # If RabbitMQ has an alarm (it lacks memory or disk), wait until the alarm ends. During an alarm RabbitMQ
            # reads nothing from publishers, so messages would pile up.
            async with answered_within(self._timeout):
                await session.connection.ready()
        except Exception:  # noqa: BLE001 - any error means that no hint is confirmed
            return [False] * len(hints)
        await self._declare_missing(session, set(names) - session.declared_queues)
        messages: dict[int, _Message] = {}  # index of the hint -> message; a hint that cannot be sent has none
        for index, (name, hint) in enumerate(zip(names, hints, strict=True)):
            if name in session.declared_queues and (message := session.encode(name, hint)) is not None:
                messages[index] = message
        confirmed = dict(zip(messages, await self._send(session, list(messages.values())), strict=True))
        return [confirmed.get(index, False) for index in range(len(hints))]

    async def _send(self, session: _Session, messages: Sequence[_Message]) -> list[bool]:
        """Send the messages, and wait until all are settled or the timeout has passed. Returns for each message whether
        it is confirmed.
        """
        if not messages:
            return []
        try:
            window = session.send(messages)
        except BrokerUnavailable:
            return [False] * len(messages)
        await asyncio.wait({window.settled}, timeout=self._timeout)
        # The leader of a quorum queue may have frozen. Then RabbitMQ 3.10 confirms nothing more on a channel that
        # published to this queue, even after the queue has another leader. A node that has lost contact to the other
        # nodes confirms nothing either. In both cases only another connection helps. If an alarm blocks the connection,
        # keep the connection, because an alarm ends by itself.
        if not window.settled.done() and session is self._session and not await _is_blocked(session.connection):
            self.link.drop(f"the node confirmed nothing for {self._timeout:g} s (LEASEHOLD_AMQP_PUBLISH_TIMEOUT)")
            session.abort()  # no handshake, because a stuck channel would delay it
        if window.has_refusals:
            self._give_up_after_refusal(session)
        return window.confirmed

    def _give_up_after_refusal(self, session: _Session) -> None:
        """Replace the channel, because RabbitMQ refuses hints on it. But keep a channel that was opened only a moment
        ago (see _REFUSED_SECONDS). The leader of a quorum queue may have died just before the channel's first message
        to the queue. Then RabbitMQ 3.10 refuses all later messages to this queue on this channel, even after the queue
        has another leader.
        """
        is_new = monotonic() - session.opened_at < self._patience_with_refusals.seconds
        if session is self._session and not is_new and not session.is_given_up.is_set():
            self._patience_with_refusals.record_loss()
            session.is_given_up.set()

    def _on_return(self, name: str) -> None:
        """Called when RabbitMQ returns a message, because its queue does not exist. Somebody has deleted the queue, or
        the broker has lost its data. The next batch declares the queue again.
        """
        self.unroutable += 1
        if self._session is not None and name in self._session.declared_queues:
            self._session.declared_queues.discard(name)
            log.warning("hint was unroutable; the queue will be declared again", queue=name)

    async def _declare_missing(self, session: _Session, names: set[str]) -> None:
        # Leave out a queue whose last declare failed, until its pause is over.
        now = monotonic()
        due_names = sorted(name for name in names if session.declare_due_at.get(name, now) <= now)
        await asyncio.gather(*(self._declare(session, name) for name in due_names))

    async def _declare(self, session: _Session, name: str) -> None:
        began_at = monotonic()
        try:
            await self._topology.declare(session.connection, name)
        except Exception as error:  # noqa: BLE001 - only the hints of this queue stay unsent
            now = monotonic()
            session.declare_due_at[name] = now + pause_after(
                now - began_at, share=_DECLARE_SHARE, at_least=0.0, at_most=_MAX_DECLARE_PAUSE_SECONDS
            )
            log.warning("queue cannot be declared", queue=name, reason=type(error).__name__, detail=str(error))
        else:
            session.declared_queues.add(name)

    async def _serve(self, connection: AbstractConnection, wire: Wire) -> None:
        # Keep one publishing channel open until the connection ends. When the channel closes or is given up, open
        # another channel.
        ladder = Ladder()  # the growing waits before another channel is opened
        while True:
            async with answered_within(RPC_SECONDS):
                channel: AbstractChannel = await connection.channel(publisher_confirms=True)
            ladder.record_opened()
            confirms = Confirms(self._on_return)
            self._session = session = _Session(connection, channel, wire, confirms)
            wire.sieve.attach(channel.number, confirms)  # the sieve gives the channel's frames to `confirms` first
            try:
                await until_one_ends(until_closed(channel), session.is_given_up.wait())
            finally:
                self._session = None
                wire.sieve.detach(channel.number, confirms)
                confirms.abandon()
            if not connection.is_opened:
                return await until_closed(connection)  # the link logs the reason, and serves the next connection
            if session.is_given_up.is_set():
                log.warning("RabbitMQ refuses hints on the publishing channel; opening another")
                await close(channel)
            else:
                log.warning("publishing channel was closed; opening another")
            await ladder.wait()


async def _is_blocked(connection: AbstractConnection) -> bool:
    """Whether RabbitMQ has blocked the connection, because of an alarm."""
    ready_task = asyncio.ensure_future(connection.ready())
    await asyncio.wait({ready_task}, timeout=0)
    is_blocked = not ready_task.done()
    await cancel_and_wait(ready_task)
    return is_blocked
