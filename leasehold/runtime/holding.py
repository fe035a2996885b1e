"""A check that no task holds a pooled connection during outbound I/O.

Otherwise tasks that wait for a remote server that does not answer would use up the pool. The pool calls `lent` for each
connection; HTTP, the object store and the broker call `going_out` before they send.
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

_Lent: TypeAlias = "PoolConnectionProxy[asyncpg.Record]"
_lent: ContextVar[tuple[_Lent, ...]] = ContextVar("lent", default=())

HELD = counter(
    "connection_held_outside_total",
    "Requests that went out while their task held a pooled connection; each is a defect of the code",
    ["to"],
)

#: Tests set it. A held connection then raises ConnectionHeld instead of being logged.
strict = False


class ConnectionHeld(LeaseholdError):
    """Outbound I/O began while this task held a pooled connection. The code must release the connection before it."""


def lent(connection: _Lent) -> None:
    """Record that the pool has lent `connection` to this task, until its release."""
    _lent.set((*_held_connections(), connection))


def going_out(to: str) -> None:
    """Call this before outbound I/O. If this task holds a pooled connection, that is counted and logged.

    Raises ConnectionHeld instead in tests.
    """
    if _lent.get() and _held_connections():
        HELD.labels(to).inc()
        if strict:
            raise ConnectionHeld(f"a pooled connection is held during a request to {to}")
        log.error("a pooled connection is held during outbound I/O", to=to)


def _held_connections() -> tuple[_Lent, ...]:
    # A released proxy has no connection. asyncpg has no public way to ask for that.
    return tuple(proxy for proxy in _lent.get() if getattr(proxy, "_con", None) is not None)
