"""The queues on RabbitMQ. They carry hints (messages that a task is due). Each queue of the platform is three queues
there, one for each priority band. One more queue has the hints that RabbitMQ has set aside (dead-lettered), for example
because it had delivered them too often. All these queues are durable.

Publishers use the default exchange with the queue's name. So no queue needs a binding. If the queue of a `mandatory`
message is missing, RabbitMQ returns the message. RabbitMQ 3.10 to 4.x accept all arguments used here; correctness
depends on none of them.
"""

from __future__ import annotations

from time import monotonic
from typing import Any, Literal

import structlog
from aiormq.abc import AbstractChannel, AbstractConnection
from aiormq.exceptions import ChannelPreconditionFailed

from leasehold.broker.amqp.connection import answered_within, close
from leasehold.broker.base import BANDS
from leasehold.runtime.gather import check_not_cancelled

#: RabbitMQ sets a hint aside (dead-letters it) after this many deliveries. This is only a second safeguard. The first
#: safeguard is in PostgreSQL, which counts the attempts.
DELIVERY_LIMIT = 20
#: The most hints that RabbitMQ keeps in the queue of hints that were set aside. People may read these hints. No task
#: needs them, because workers also find tasks by polling PostgreSQL.
SET_ASIDE_MAX = 10_000
#: How long a request may wait for RabbitMQ's answer, in seconds. A declare of a quorum queue without a leader would
#: hang for a minute, and a new try may succeed within this minute.
RPC_SECONDS = 10.0
#: The pause after a failed declare of the queue of hints that were set aside, in seconds. Each try may take
#: RPC_SECONDS, and the `declare` of another queue waits until the try has ended.
_SET_ASIDE_PAUSE_SECONDS = 60.0

log = structlog.get_logger(__name__)


class Topology:
    """Names and declares the queues on RabbitMQ."""

    def __init__(self, prefix: str, queue_type: Literal["classic", "quorum"]) -> None:
        self.prefix = prefix
        self.queue_type = queue_type
        self._conflicts: set[str] = set()  # the queues whose conflict is logged already
        self._set_aside_due_at = float("-inf")  # when the queue of hints that were set aside may be declared again

    @property
    def set_aside_queue(self) -> str:
        """The name of the queue of hints that were set aside."""
        return f"{self.prefix}.parked"

    def name_of(self, queue: str, band: int) -> str:
        """The name on RabbitMQ of one priority band of a queue."""
        return f"{self.prefix}.{queue}.{BANDS[band]}"

    async def declare(self, connection: AbstractConnection, name: str) -> None:
        """Make sure that the queue `name` exists and, if RabbitMQ allows it, the queue of hints that were set aside.

        Each declare has a separate channel, because a refusal closes the channel. If a queue exists with other
        arguments, this logs the conflict, and the existing queue is used. Raises any other error of the broker about
        the queue `name`.
        """
        await self._declare(connection, name, self._arguments())
        await self._try_to_declare_set_aside(connection)

    async def _try_to_declare_set_aside(self, connection: AbstractConnection) -> None:
        """Declare the queue of hints that were set aside. An error is only logged, because no task needs this queue,
        and the hints of all other queues must not wait for it. While one call declares the queue, other calls do
        nothing.
        """
        if monotonic() < self._set_aside_due_at:
            return
        self._set_aside_due_at = float("inf")
        pause_seconds = 0.0
        try:
            await self._declare(connection, self.set_aside_queue, self._set_aside_arguments())
        except Exception as error:  # noqa: BLE001 - of any kind, as the docstring says
            check_not_cancelled()
            pause_seconds = _SET_ASIDE_PAUSE_SECONDS
            log.warning(
                "the queue of hints that were set aside cannot be declared; RabbitMQ drops such hints",
                queue=self.set_aside_queue,
                reason=type(error).__name__,
                detail=str(error),
            )
        finally:
            self._set_aside_due_at = monotonic() + pause_seconds

    async def _declare(self, connection: AbstractConnection, name: str, arguments: dict[str, Any]) -> None:
        channel: AbstractChannel | None = None
        try:
            async with answered_within(RPC_SECONDS):
                channel = await connection.channel(publisher_confirms=False)
                await channel.queue_declare(name, durable=True, arguments=arguments)
        except ChannelPreconditionFailed as conflict:
            self._log_conflict(name, conflict)
        finally:
            if channel is not None:
                await close(channel)

    def _log_conflict(self, name: str, conflict: ChannelPreconditionFailed) -> None:
        if name in self._conflicts:
            return
        self._conflicts.add(name)
        log.error(
            "queue exists with other arguments and is used as it is; delete it, or change amqp_queue_prefix",
            queue=name,
            wanted_type=self.queue_type,
            answer=str(conflict),
        )

    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "x-queue-type": self.queue_type,
            "x-dead-letter-exchange": "",  # the default exchange
            "x-dead-letter-routing-key": self.set_aside_queue,
        }
        if self.queue_type == "quorum":
            arguments["x-delivery-limit"] = DELIVERY_LIMIT
        return arguments

    def _set_aside_arguments(self) -> dict[str, Any]:
        return {"x-queue-type": self.queue_type, "x-max-length": SET_ASIDE_MAX, "x-overflow": "drop-head"}
