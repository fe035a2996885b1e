"""Checks that no task holds a pooled connection during outbound I/O.

Otherwise tasks that wait for a remote server that does not answer would use up the pool. The pool calls `borrowed` for
each connection. Egress, the object store and the broker call `check_nothing_held` before they send.

A task that is made while its maker holds a connection counts as holding it, too, because the maker mostly awaits it
(gather, wait_for). Exception: make a background task before the connection is taken, or with `context=Context()`.
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

_Borrowed: TypeAlias = "PoolConnectionProxy[asyncpg.Record]"
_borrowed: ContextVar[tuple[_Borrowed, ...]] = ContextVar("borrowed", default=())

HELD = counter(
    "connection_held_outside_total",
    "Requests that went out while their task held a pooled connection; each is a defect of the code",
    ["to"],
)

#: Tests set this to True: a held connection then raises ConnectionHeld, and is not only logged.
strict = False


class ConnectionHeld(LeaseholdError):
    """Outbound I/O began while this task, or the task that made it, held a pooled connection. Release it before."""


def borrowed(connection: _Borrowed) -> None:
    """Record that this task has `connection` of the pool, until its release."""
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


def _held_connections() -> tuple[_Borrowed, ...]:
    # A released proxy has no connection. asyncpg has no public way to read that.
    return tuple(proxy for proxy in _borrowed.get() if getattr(proxy, "_con", None) is not None)
