"""Which statement may change a picture's row in which state: each state here is refused by one guard alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from leasehold.db.database import Connection
from leasehold.pipelines.media import transitions
from leasehold.pipelines.media.pipeline import MediaParams, media
from leasehold.transitions.jobs import NewJob
from tests.api.media_api import MediaApi, Ticket

SECONDS = 300


async def complete(rows: Connection, ticket: Ticket, tenant: str) -> bool:
    params, inputs = MediaParams().model_dump(mode="json"), {"original": ticket.original_key}
    job = NewJob(media, tenant, params=params, inputs=inputs)
    return await transitions.complete_upload(rows, UUID(ticket.media_id), tenant, 1, job) is not None


async def refuse(rows: Connection, ticket: Ticket, tenant: str) -> bool:
    error, keep = {"code": "too_large", "message": "Too large.", "retryable": False}, timedelta(days=1)
    return await transitions.refuse_upload(rows, UUID(ticket.media_id), tenant, error=error, keep=keep)


async def extend(rows: Connection, ticket: Ticket, tenant: str) -> bool:
    return await transitions.extend_upload(rows, tenant, ticket.original_key, SECONDS)


async def delete(rows: Connection, ticket: Ticket, tenant: str) -> bool:
    return await transitions.delete(rows, UUID(ticket.media_id), tenant, "tests") is not None


VERBS: dict[str, Callable[[Connection, Ticket, str], Awaitable[bool]]] = {
    "complete": complete, "refuse": refuse, "extend": extend, "delete": delete,
}  # fmt: skip
LONG_ENOUGH = "clock_timestamp() + interval '1 hour'"
#: How a new picture gets into the state, and the verbs that may change it there.
STATES: dict[str, tuple[str, set[str]]] = {
    "INIT": ("SELECT", {"complete", "refuse", "extend", "delete"}),
    "expired": ("UPDATE media SET expires_at = clock_timestamp()", {"refuse", "delete"}),
    "expires before a new URL does": (
        f"UPDATE media SET expires_at = clock_timestamp() + interval '{SECONDS - 100} s'",
        {"complete", "refuse", "delete"},
    ),
    "UPLOADED": (f"UPDATE media SET status = 'UPLOADED', size = 1, expires_at = {LONG_ENOUGH}", {"delete"}),
    "FAILED": (f"UPDATE media SET status = 'FAILED', error = '{{}}', expires_at = {LONG_ENOUGH}", {"delete"}),
    "closed": ("UPDATE upload SET open = false", {"complete", "refuse", "delete"}),
    "deleted": (
        f"UPDATE media SET deleted_at = clock_timestamp(), expires_at = {LONG_ENOUGH}; UPDATE upload SET open = false",
        set(),
    ),
}


@pytest.mark.parametrize("state", STATES)
async def test_a_picture_is_changed_by_those_verbs_alone_that_its_state_admits(
    media_api: MediaApi, rows: Connection, state: str
) -> None:
    change, admitted = STATES[state]
    ticket = await media_api.ticket()
    await rows.execute(f"UPDATE media SET expires_at = {LONG_ENOUGH}")
    await rows.execute(change)
    for tenant, expected in (("acme", admitted), ("rival", set[str]())):
        done = set()
        for name, verb in VERBS.items():
            transaction = rows.transaction()
            await transaction.start()
            if await verb(rows, ticket, tenant):
                done.add(name)
            await transaction.rollback()
        assert done == expected, tenant


async def test_a_new_url_moves_all_times_of_its_upload(media_api: MediaApi, rows: Connection) -> None:
    ticket = await media_api.ticket()
    await rows.execute(f"UPDATE media SET expires_at = {LONG_ENOUGH}")
    old = "clock_timestamp() - interval '1 minute'"
    await rows.execute(f"UPDATE upload SET writable_until = {old}, forget_at = {old}, look_at = {LONG_ENOUGH}")
    assert await extend(rows, ticket, "acme")
    times: Any = await rows.fetchrow(
        "SELECT writable_until - clock_timestamp() AS writable, forget_at - writable_until AS transfer,"
        " look_at - clock_timestamp() AS look FROM upload"
    )
    assert timedelta(seconds=SECONDS - 60) < times["writable"] <= timedelta(seconds=SECONDS)
    assert times["transfer"] >= timedelta(days=1)
    assert times["look"] <= timedelta(minutes=1)


async def test_a_picture_without_a_job_goes_at_once_and_one_with_a_job_goes_with_it(
    media_api: MediaApi, rows: Connection
) -> None:
    without_job, with_job = await media_api.ticket(), await media_api.submitted()
    is_due = "SELECT expires_at <= clock_timestamp() FROM media WHERE id = $1"
    assert await rows.fetchval(is_due, UUID(with_job.media_id)) is None
    await rows.execute("UPDATE job SET cancelable = false")
    assert await delete(rows, without_job, "acme")
    assert await delete(rows, with_job, "acme")
    assert await rows.fetchval(is_due, UUID(without_job.media_id))
    assert await rows.fetchval(is_due, UUID(with_job.media_id)) is None
    assert await rows.fetchval("SELECT status FROM job") == "cancelled", "although nobody else may cancel it"
