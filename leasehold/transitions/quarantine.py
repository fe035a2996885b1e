"""Quarantine: a unit of a duty (one schedule, one job, one object) that fails is set aside, and its neighbours go on.

A batch is done in one transaction. If that fails, each of its units is done by itself, and the one that fails alone is
written down with its error and the time of its next try: seconds at first, an hour in the end. Selecting statements
pass over what is set aside (`not_in`). A unit that succeeds when it is tried again leaves its row behind: the row says
nothing once its `retry_at` has passed, and `forget` removes it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import asyncpg
import structlog
from pydantic import ValidationError

from leasehold.db.database import Connection
from leasehold.domain.errors import RequestError, StepError, StoreError
from leasehold.runtime.periodic import first_of_kind
from leasehold.runtime.transient import may_try_again
from leasehold.telemetry.duties import FAILURES, STUCK

log = structlog.get_logger(__name__)
_T = TypeVar("_T")
_U = TypeVar("_U")

#: Seconds until a unit that failed is tried again; the last counts for all that follow.
BACKOFF = (5, 15, 60, 300, 900, 3600)
#: Failures in a row after which a unit counts as stuck: an operator is told, and what can be disabled is.
STUCK_AFTER = 5
#: A unit that failed is not in a row with a failure whose next try was due so long before.
_ROW_ENDS = timedelta(minutes=10)

_RECORD = """
-- quarantine
INSERT INTO quarantine AS q (duty, unit, failures, error, retry_at)
VALUES ($1, $2, 1, $3, clock_timestamp() + make_interval(secs => ($4::int[])[1]))
ON CONFLICT (duty, unit) DO UPDATE
SET failures = CASE WHEN q.retry_at < clock_timestamp() - $5::interval THEN 1 ELSE q.failures + 1 END,
    error = excluded.error, failed_at = clock_timestamp(),
    retry_at = clock_timestamp() + make_interval(secs => ($4::int[])[
        CASE WHEN q.retry_at < clock_timestamp() - $5::interval THEN 1
             ELSE least(q.failures + 1, cardinality($4::int[])) END])
RETURNING failures
"""


def not_in(duty: str, unit: str, kind: str = "uuid") -> str:
    """SQL: `unit`, an expression of the type `kind`, is not set aside in `duty`. Asked once a statement."""
    return (
        f"{unit} <> ALL(ARRAY(SELECT q.unit::{kind} FROM quarantine q"
        f" WHERE q.duty = '{duty}' AND q.retry_at > statement_timestamp()))"
    )


def is_away(connection: Connection, error: BaseException) -> bool:
    """Whether the error is the database's absence, rather than the unit's. A statement that took too long is the
    unit's, for all that we know: if the database hangs, writing that down will say so.
    """
    if connection.is_closed():
        return True
    too_long = isinstance(error, (TimeoutError, asyncpg.QueryCanceledError))
    return may_try_again(error) and not too_long


def described(error: BaseException) -> dict[str, str]:
    """The error for whoever may see the unit: `code` and `message`. Of an unforeseen one only its type."""
    if isinstance(error, (RequestError, StepError)):
        return {"code": error.code, "message": error.message}
    if isinstance(error, StoreError):
        return {"code": "store_error", "message": str(error)}
    code = "unreadable" if isinstance(error, ValidationError) else "unforeseen"
    return {"code": code, "message": f"{type(error).__name__}; the log of the worker has more"}


async def set_aside(connection: Connection, duty: str, unit: object, error: Exception) -> int:
    """Write a failure down; returns how many the unit has had in a row. Raises one of TRY_AGAIN."""
    failures: int = await connection.fetchval(_RECORD, duty, str(unit), described(error), list(BACKOFF), _ROW_ENDS)
    FAILURES.labels(duty).inc()
    said = {"duty": duty, "unit": str(unit), "error": type(error).__name__, "failures": failures}
    if failures == 1:
        log.warning("a unit failed and is set aside; the others go on", **said, exc_info=first_of_kind(duty, error))
    elif failures == STUCK_AFTER:
        STUCK.labels(duty).inc()
        log.error("a unit keeps failing", **said)
    return failures


async def alone(
    connection: Connection,
    duty: str,
    unit: object,
    work: Callable[[], Awaitable[_T]],
    failed: Callable[[Exception, int], Awaitable[None]] | None = None,
) -> _T | None:
    """`work` in a transaction of its own; None if it failed and the unit was set aside.

    `failed` is called in the transaction that says so, with the error and the failures in a row. Raises what says that
    the database is away.
    """
    try:
        async with connection.transaction():
            return await work()
    except Exception as error:
        if is_away(connection, error):
            raise
        async with connection.transaction():
            failures = await set_aside(connection, duty, unit, error)
            if failed is not None:
                await failed(error, failures)
        return None


async def each(
    connection: Connection,
    duty: str,
    take: Callable[[object | None], Awaitable[Sequence[_U]]],
    work: Callable[[Sequence[_U]], Awaitable[Sequence[_T]]],
    key: Callable[[_U], object] = lambda unit: unit,
) -> list[_T]:
    """`work` on what `take(None)` gives, in one transaction; if that fails, on each unit by itself.

    `take` locks the units, and given the key of one, that one only, if it is still due.
    """
    taken: Sequence[_U] = ()
    try:
        async with connection.transaction():
            taken = await take(None)
            return list(await work(taken)) if taken else []
    except Exception as error:
        if not taken or is_away(connection, error):
            raise
    found: list[_T] = []
    for unit in [key(one) for one in taken]:

        async def one(unit: object = unit) -> Sequence[_T]:
            again = await take(unit)
            return await work(again) if again else ()

        found += await alone(connection, duty, unit, one) or ()
    return found


async def each_of(
    connection: Connection,
    duty: str,
    units: Sequence[_U],
    work: Callable[[Sequence[_U]], Awaitable[Sequence[_T]]],
    key: Callable[[_U], object] = lambda unit: unit,
) -> list[_T]:
    """As `each`, of units that are known and need no lock."""

    async def take(unit: object | None) -> Sequence[_U]:
        return units if unit is None else [one for one in units if key(one) == unit]

    return await each(connection, duty, take, work, key)


async def release(connection: Connection, duty: str, unit: object) -> None:
    """Somebody has changed it: it is tried at its next turn, and its failures begin anew."""
    await connection.execute("DELETE FROM quarantine WHERE duty = $1 AND unit = $2", duty, str(unit))


async def forget(connection: Connection, limit: int = 1000) -> None:
    """Remove what was mended: a unit that still failed would have been tried, and set aside, again."""
    await connection.execute(
        "DELETE FROM quarantine WHERE (duty, unit) IN (SELECT duty, unit FROM quarantine"
        " WHERE retry_at < statement_timestamp() - $1::interval ORDER BY retry_at LIMIT $2)",
        2 * _ROW_ENDS,
        limit,
    )


async def listed(connection: Connection, limit: int = 100) -> Sequence[Any]:
    """What is set aside now, the latest failures first."""
    return await connection.fetch(
        "SELECT duty, unit, failures, error, failed_at, retry_at FROM quarantine"
        " WHERE retry_at > statement_timestamp() ORDER BY failed_at DESC LIMIT $1",
        limit,
    )
