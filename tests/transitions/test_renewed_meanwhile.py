"""Housekeeping forgets old rows by statements that find them first and delete them then. A row that another
transaction renews in between is no old row any more: it stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest

from leasehold.db import idempotency
from leasehold.db.database import Connection
from leasehold.db.idempotency import Reservation, StoredAnswer
from leasehold.domain.errors import TooMany
from leasehold.limits import rates
from leasehold.pipelines.media.housekeeping import jobless_pictures
from leasehold.transitions import quarantine, sweeps
from tests.factories import Rows
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open

HASH = idempotency.fingerprint(b"POST /v1/runs", b"{}")


async def answer_again(connection: Connection) -> None:
    """A client repeats its key after a day; its new request is answered in the transaction of its work."""
    reservation = await idempotency.reserve(connection, "t", "key", HASH)
    assert isinstance(reservation, Reservation)
    await idempotency.store(connection, reservation, 202, b"new")


async def has_new_answer(connection: Connection) -> bool:
    answer = await idempotency.reserve(connection, "t", "key", HASH)
    return isinstance(answer, StoredAnswer) and answer.body == b"new"


async def charge_all(connection: Connection) -> None:
    assert (await rates.take(connection, "k", 60, 60)).allowed


async def has_debt(connection: Connection) -> bool:
    return not (await rates.take(connection, "k", 60, 2)).allowed


async def set_aside(connection: Connection) -> None:
    await quarantine.set_aside(connection, "leases", "unit", TooMany("x", "", policy="p", at_most=1, retry_after=1.0))


async def is_set_aside(connection: Connection) -> bool:
    return [row["unit"] for row in await quarantine.list_units(connection)] == ["unit"]


class Case(NamedTuple):
    """`old`: SQL that writes an old row. `renew`: renews it. `is_kept`: whether the renewed row is there."""

    old: str
    renew: Callable[[Connection], Awaitable[None]]
    forget: Callable[[Connection], Awaitable[object]]
    is_kept: Callable[[Connection], Awaitable[bool]]


CASES = {
    "an idempotency key": Case(
        "INSERT INTO idempotency (tenant_id, key, request_hash, status_code, body, locked_until, expires_at)"
        " VALUES ('t', 'key', '', 202, 'old', clock_timestamp() - interval '1 day', clock_timestamp())",
        answer_again, sweeps.forget_idempotency_keys, has_new_answer,
    ),
    "a rate": Case(
        "INSERT INTO rate_bucket (key, full_at) VALUES ('k', clock_timestamp())",
        charge_all, rates.forget_rates, has_debt,
    ),
    "a unit that is set aside": Case(
        "INSERT INTO quarantine (duty, unit, failures, error, failed_at, retry_at) SELECT 'leases', 'unit', 1, '{}',"
        " clock_timestamp() - interval '1 hour', clock_timestamp() - interval '1 hour'",
        set_aside, quarantine.forget, is_set_aside,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_what_is_renewed_while_it_is_being_forgotten_stays(rows: Rows, another: Open, case: Case) -> None:
    renewing, forgetting = (await another()).connection, (await another()).connection
    await rows.connection.execute(case.old)
    async with renewing.transaction():
        await case.renew(renewing)
        forgotten = asyncio.ensure_future(case.forget(forgetting))
        waiting = asyncio.create_task(until_waiting(rows.connection))
        await asyncio.wait({forgotten, waiting}, return_when=asyncio.FIRST_COMPLETED)
        assert not waiting.done()  # housekeeping passes over a row that is locked, and goes on with the others
        waiting.cancel()
    await forgotten
    assert await case.is_kept(renewing)


async def test_a_job_whose_retry_began_just_before_its_time_was_over_keeps_its_objects(
    rows: Rows, another: Open
) -> None:
    """Housekeeping deletes the objects of the jobs that it finds, before it deletes their rows."""
    await rows.submit(count=2)
    await rows.connection.execute(
        "UPDATE job SET status = 'failed', finished_at = clock_timestamp(), expires_at = clock_timestamp()"
    )
    retrying = (await another()).connection
    (retried, other) = [row["id"] for row in await rows.connection.fetch("SELECT id FROM job ORDER BY id")]
    async with retrying.transaction():
        await retrying.execute(  # as `replay` does, while the time was not over
            "UPDATE job SET status = 'pending', finished_at = NULL, expires_at = NULL WHERE id = $1", retried
        )
        assert [job.job_id for job in await sweeps.forgettable_jobs(rows.connection)] == [other]


async def test_a_picture_whose_completion_began_just_before_its_time_was_over_keeps_its_object(
    rows: Rows, another: Open
) -> None:
    await rows.submit()
    await rows.connection.execute(
        "INSERT INTO media (id, tenant_id, content_type, original_key, file_name, expires_at)"
        " SELECT gen_random_uuid(), 't', 'image/jpeg', n::text, '', clock_timestamp() FROM generate_series(1, 2) AS n"
    )
    completing = (await another()).connection
    async with completing.transaction():
        await completing.execute(  # as `complete_upload` does, while the time was not over
            "UPDATE media SET status = 'UPLOADED', job_id = job.id, expires_at = NULL FROM job WHERE original_key = '1'"
        )
        assert [key for _, key in await jobless_pictures(rows.connection)] == ["2"]
