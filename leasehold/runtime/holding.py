"""Checks that no asyncio task holds a pooled connection during outbound I/O.

Otherwise asyncio tasks that wait for a slow remote server would use up the pool. The pool calls `record_borrowed` for
each connection that it lends. Egress (requests to outside addresses), the object store and the broker call
`check_nothing_held` before they send.

If an asyncio task holds a connection and creates a second asyncio task, the second task counts as holding the
connection, too, because the first task usually awaits it (gather, wait_for). If the first task does not await the
second task, create the second task before the connection is acquired, or with `context=Context()`.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TypeAlias

import asyncpg
import structlog
from asyncpg.pool import PoolConnectionProxy

from leasehold.domain.errors import LeaseholdError
from leasehold.telemetry.meters import counter

log = structlog.get_logger(__name__)

_BorrowedConnection: TypeAlias = "PoolConnectionProxy[asyncpg.Record]"
#: The connections that the current asyncio task has borrowed, and those that its creator (another asyncio task) held
#: when it created the task. Some of these connections may have been released.
_borrowed: ContextVar[tuple[_BorrowedConnection, ...]] = ContextVar("borrowed", default=())

HELD = counter(
    "connection_held_outside_total",
    "Requests that went out while their task held a pooled connection; each is a defect of the code",
    ["to"],
)

#: Tests set this to True: then `check_nothing_held` raises ConnectionHeld instead of logging.
strict = False


class ConnectionHeld(LeaseholdError):
    """Outbound I/O began while this asyncio task, or the asyncio task that created it, held a pooled connection.
    Release the connection first.
    """


def record_borrowed(connection: _BorrowedConnection) -> None:
    """Record that this asyncio task holds a connection of the pool. The record counts until the release."""
    _borrowed.set((*_held_connections(), connection))


def check_nothing_held(to: str) -> None:
    """Call this before outbound I/O. Counts and logs the defect if a pooled connection is held.

    In tests (`strict`) it raises ConnectionHeld instead of logging.
    """
    if _borrowed.get() and _held_connections():
        HELD.labels(to).inc()
        if strict:
            raise ConnectionHeld(f"a pooled connection is held during a request to {to}")
        log.error("a pooled connection is held during outbound I/O", to=to)


def _held_connections() -> tuple[_BorrowedConnection, ...]:
    """The connections that this asyncio task holds. A proxy whose connection was released has no `_con`; no public
    attribute of asyncpg shows the release.
    """
    return tuple(proxy for proxy in _borrowed.get() if getattr(proxy, "_con", None) is not None)
