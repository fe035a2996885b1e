"""No connection is held while a task waits for the outside: a silent server would take the pool away from everybody.

The pool notes what it lends to a task, and each way out (HTTP, the object store, the broker) asks here first.
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

#: Tests set it: then a connection that is held is an error, and not a line of the log.
strict = False


class ConnectionHeld(LeaseholdError):
    """Outbound I/O began while this task held a pooled connection: the code must give it back before."""


def lent(connection: _Lent) -> None:
    """The pool has lent `connection` to this task, until its release."""
    _lent.set((*_still_held(), connection))


def going_out(to: str) -> None:
    """This task begins outbound I/O. A connection in its hands is counted and logged.

    Raises ConnectionHeld in tests.
    """
    if _lent.get() and _still_held():
        HELD.labels(to).inc()
        if strict:
            raise ConnectionHeld(f"a pooled connection is held while {to} is asked")
        log.error("a pooled connection is held during outbound I/O", to=to)


def _still_held() -> tuple[_Lent, ...]:
    # A proxy that was released leads nowhere; asyncpg has no public way to ask.
    return tuple(one for one in _lent.get() if getattr(one, "_con", None) is not None)
