"""Quarantine: if a maintenance loop (a duty) fails at one of its units (a schedule, a job, an object), the duty sets
the unit aside and goes on with the others.

A duty handles a batch of units in one transaction. If the batch fails, the duty handles each unit by itself. If a unit
then fails, a row of the table `quarantine` records its error and the time of its next try (`retry_at`). The pause
before a try grows with each failure, from seconds to an hour. The statements with which a duty selects its units leave
out the units that are set aside (`not_in`). If a unit succeeds at a later try, its row has no more effect, because
`retry_at` has passed. `forget` deletes such rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import structlog
from pydantic import ValidationError

from leasehold.db.database import Connection, row_count
from leasehold.domain.errors import RequestError, StepError, StoreError
from leasehold.runtime.periodic import first_of_kind
from leasehold.runtime.transient import TIMED_OUT, may_try_again
from leasehold.telemetry.duties import FAILURES, STUCK

log = structlog.get_logger(__name__)
_Result = TypeVar("_Result")
_Unit = TypeVar("_Unit")

#: Seconds until a failed unit is tried again: after the first failure in a row, after the second, and so on. The last
#: number also holds for all further failures.
BACKOFF = (5, 15, 60, 300, 900, 3600)
#: After this many failures in a row a unit is stuck. The failure is then logged as an error, and some duties disable
#: the unit.
STUCK_AFTER = 5
#: Two failures of a unit are in a row if the second comes at most this long after the retry time of the first.
_IN_A_ROW = timedelta(minutes=10)

# $1 is the duty, $2 is the unit, $3 is the error, $4 is BACKOFF, and $5 is _IN_A_ROW. After the n-th failure in a row,
# the pause until `retry_at` is the n-th element of $4, or its last element.
_RECORD = """
-- quarantine
INSERT INTO quarantine AS q (duty, unit, failures, error, failed_at, retry_at)
VALUES ($1, $2, 1, $3, statement_timestamp(), statement_timestamp() + make_interval(secs => ($4::int[])[1]))
ON CONFLICT (duty, unit) DO UPDATE
SET failures = CASE WHEN q.retry_at < statement_timestamp() - $5::interval THEN 1 ELSE q.failures + 1 END,
    error = excluded.error, failed_at = excluded.failed_at,
    retry_at = excluded.failed_at + make_interval(secs => ($4::int[])[
        CASE WHEN q.retry_at < statement_timestamp() - $5::interval THEN 1
             ELSE least(q.failures + 1, cardinality($4::int[])) END])
RETURNING failures
"""


def not_in(duty: str, unit: str, kind: str = "uuid") -> str:
    """SQL condition: the unit is not set aside in `duty`. `unit`: an SQL expression of the type `kind`. A statement
    with this condition reads the list of the units that are set aside only once.
    """
    return (
        f"{unit} <> ALL(ARRAY(SELECT q.unit::{kind} FROM quarantine q"
        f" WHERE q.duty = '{duty}' AND q.retry_at > statement_timestamp()))"
    )


def is_away(connection: Connection, error: BaseException) -> bool:
    """Whether the error means that the database cannot be reached. Any other error counts as the unit's own fault, even
    the timeout of a statement. If a statement timed out because the database hangs, `set_aside` fails as well, and the
    unit is not set aside.
    """
    if connection.is_closed():
        return True
    has_timed_out = isinstance(error, TIMED_OUT)
    return may_try_again(error) and not has_timed_out


def error_record(error: BaseException) -> dict[str, str]:
    """The error for people who look at the unit: `code` and `message`. An unforeseen error shows only its type."""
    if isinstance(error, (RequestError, StepError)):
        return {"code": error.code, "message": error.message}
    if isinstance(error, StoreError):
        return {"code": "store_error", "message": str(error)}
    code = "unreadable" if isinstance(error, ValidationError) else "unforeseen"
    return {"code": code, "message": f"{type(error).__name__}; the worker's log has more"}


async def set_aside(connection: Connection, duty: str, unit: object, error: Exception) -> int:
    """Record a failure of the unit. Returns the number of its failures in a row. Raises one of
    runtime.transient.TRY_AGAIN if the database cannot be reached.
    """
    failures: int = await connection.fetchval(_RECORD, duty, str(unit), error_record(error), list(BACKOFF), _IN_A_ROW)
    FAILURES.labels(duty).inc()
    fields = {"duty": duty, "unit": str(unit), "error": type(error).__name__, "failures": failures}
    if failures == 1:  # `first_of_kind`: the traceback, if this duty has not logged such an error yet
        log.warning("a unit failed and is set aside; the others go on", **fields, exc_info=first_of_kind(duty, error))
    elif failures == STUCK_AFTER:
        STUCK.labels(duty).inc()
        log.error("a unit keeps failing", **fields)
    return failures


async def run_unit(
    connection: Connection,
    duty: str,
    unit: object,
    work: Callable[[], Awaitable[_Result]],
    on_failure: Callable[[Exception, int], Awaitable[None]] | None = None,
) -> _Result | None:
    """Run `work` in a new transaction. Returns the result of `work`. If `work` fails, sets the unit aside, and returns
    None.

    `on_failure`: called with the error and the number of failures in a row, in the transaction that records the
    failure. `run_unit` raises the error of `work` only if the database cannot be reached.
    """
    try:
        async with connection.transaction():
            return await work()
    except Exception as error:
        if is_away(connection, error):
            raise
        async with connection.transaction():
            failures = await set_aside(connection, duty, unit, error)
            if on_failure is not None:
                await on_failure(error, failures)
        return None


async def run_units(
    connection: Connection,
    duty: str,
    take: Callable[[object | None], Awaitable[Sequence[_Unit]]],
    work: Callable[[Sequence[_Unit]], Awaitable[Sequence[_Result]]],
    key: Callable[[_Unit], object] = lambda unit: unit,
) -> list[_Result]:
    """Run `work` on all units that `take(None)` returns, in one transaction. If `work` fails, run it on each unit by
    itself. Returns the results.

    `take(None)` locks and returns the units that are due. `take(unit_key)` locks and returns this one unit if it is
    still due, and otherwise returns no unit. `key(unit)`: the unit's name in the quarantine, which `take` gets.
    """
    units: Sequence[_Unit] = ()
    try:
        async with connection.transaction():
            units = await take(None)
            return list(await work(units)) if units else []
    except Exception as error:
        if not units or is_away(connection, error):
            raise
    results: list[_Result] = []
    for unit_key in [key(unit) for unit in units]:
        # The first transaction has ended and has released its locks, so the unit must be taken again.
        async def work_on_unit(unit_key: object = unit_key) -> Sequence[_Result]:
            still_due = await take(unit_key)
            return await work(still_due) if still_due else ()

        results += await run_unit(connection, duty, unit_key, work_on_unit) or ()
    return results


async def run_known_units(
    connection: Connection,
    duty: str,
    units: Sequence[_Unit],
    work: Callable[[Sequence[_Unit]], Awaitable[Sequence[_Result]]],
    key: Callable[[_Unit], object] = lambda unit: unit,
) -> list[_Result]:
    """The same as `run_units`, for units that the caller has read already and that need no lock."""

    async def take(unit_key: object | None) -> Sequence[_Unit]:
        return units if unit_key is None else [unit for unit in units if key(unit) == unit_key]

    return await run_units(connection, duty, take, work, key)


async def release(connection: Connection, duty: str, unit: object) -> None:
    """Let the duty select the unit again immediately, and count the unit's failures from zero. Call this when a person
    has changed the unit.
    """
    await connection.execute("DELETE FROM quarantine WHERE duty = $1 AND unit = $2", duty, str(unit))


async def forget(connection: Connection, limit: int = 1000) -> bool:
    """Delete old rows, at most `limit`. The units of these rows work again, because a unit that still failed would have
    got a later `retry_at`. SKIP LOCKED leaves out a unit that another transaction is setting aside. Returns True if
    there may be more old rows.
    """
    status = await connection.execute(
        "DELETE FROM quarantine WHERE (duty, unit) IN (SELECT duty, unit FROM quarantine"
        " WHERE retry_at < statement_timestamp() - $1::interval ORDER BY retry_at LIMIT $2 FOR UPDATE SKIP LOCKED)",
        2 * _IN_A_ROW,
        limit,
    )
    return row_count(status) >= limit


async def list_units(connection: Connection, limit: int = 100) -> Sequence[Any]:
    """The units that are set aside now, the latest failures first."""
    return await connection.fetch(
        "SELECT duty, unit, failures, error, failed_at, retry_at FROM quarantine"
        " WHERE retry_at > statement_timestamp() ORDER BY failed_at DESC LIMIT $1",
        limit,
    )
