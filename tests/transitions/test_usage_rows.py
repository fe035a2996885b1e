"""What a tenant has is counted in its own rows, and only in those that still count."""

from __future__ import annotations

from uuid import UUID

import asyncpg
import pytest

from leasehold.limits.usage import Usage
from leasehold.settings import Settings
from leasehold.transitions import settlements
from tests.factories import Rows
from tests.transitions.conftest import Open

SETTINGS = Settings(_env_file=None)
#: One thing of each kind. $1: the tenant. $2: a name.
_TEMPLATE = "INSERT INTO template (tenant_id, type, version, declaration) VALUES ($1, $2, 1, '{}')"
_SCHEDULE = """
INSERT INTO schedule (id, tenant_id, template, cron, timezone, payload_template, scope, scope_id, priority, overlap,
                      catch_up, catch_up_seconds)
VALUES (gen_random_uuid(), $1, $2, '0 * * * *', 'UTC', '{}', '', '', 1, 'skip', 'skip', 0)
"""
_WEBHOOK = "INSERT INTO webhook (id, tenant_id, url, secrets, events) VALUES (gen_random_uuid(), $1, $2, '{}', '{}')"
_LIMIT = "INSERT INTO gate (tenant_id, key, declared) VALUES ($1, $2, true)"
_THINGS = (_TEMPLATE, _SCHEDULE, _WEBHOOK, _LIMIT)


def limited(unfinished: int) -> Usage:
    bounds = {"unfinished_per_tenant": unfinished, "stored_bytes_per_tenant": 0}
    return Usage(SETTINGS.model_copy(update=bounds), ["SELECT CASE $1 WHEN 't' THEN 5 ELSE 0 END"])


async def add_things(rows: Rows, tenant: str, number: int) -> None:
    """So many of each thing, and a limit that no operator has declared."""
    for nth in range(number):
        for statement in _THINGS:
            await rows.connection.execute(statement, tenant, str(nth))
    await rows.connection.execute("INSERT INTO gate (tenant_id, key) VALUES ($1, 'undeclared')", tenant)


async def add_keys(rows: Rows, tenant: str) -> None:
    """Two keys that can be used, and two that cannot any more."""
    for name, expires_at, revoked_at in (
        ("for ever", "NULL", "NULL"),
        ("for an hour", "now() + interval '1 hour'", "NULL"),
        ("expired", "now() - interval '1 second'", "NULL"),
        ("revoked", "NULL", "now()"),
    ):
        await rows.connection.execute(
            "INSERT INTO api_key (id, prefix, secret_hash, tenant_id, client_id, scopes, expires_at, revoked_at)"
            f" VALUES (gen_random_uuid(), $1, '', $2, 'tests', '{{}}', {expires_at}, {revoked_at})",
            f"{name} of {tenant}", tenant,
        )  # fmt: skip


async def store(rows: Rows, task_id: UUID, tenant: str, *sizes: int) -> None:
    """The task's outputs."""
    for nth, size in enumerate(sizes):
        await rows.connection.execute(
            "INSERT INTO output (task_id, name, job_id, step, key, size, sha256, content_type, tenant_id)"
            " SELECT id, $2, job_id, step, $2, $3, '', '', $4 FROM task WHERE id = $1",
            task_id, str(nth), size, tenant,
        )  # fmt: skip


async def test_what_a_tenant_has_is_counted_in_its_own_rows_that_still_count(rows: Rows) -> None:
    for tenant, unfinished, things in (("t", 2, 3), ("u", 4, 5)):
        finished = await rows.leased(tenant=tenant)
        await settlements.complete(rows.connection, [settlements.Completion(finished.lease)])
        await store(rows, finished.lease.task_id, tenant, 100 * unfinished, 1)
        await rows.submit(tenant=tenant, count=unfinished)
        await add_things(rows, tenant, things)
        await add_keys(rows, tenant)
    counts = {tenant: await limited(0).measure(rows.connection, tenant) for tenant in ("t", "u", "nobody")}
    names = ("unfinished_jobs", "stored_bytes", "templates", "schedules", "webhooks", "limits", "keys")
    assert {tenant: [found[name] for name in names] for tenant, found in counts.items()} == {
        "t": [2, 206, 3, 3, 3, 3, 2],
        "u": [4, 401, 5, 5, 5, 5, 2],
        "nobody": [0, 0, 0, 0, 0, 0, 0],
    }


async def test_the_check_after_the_write_waits_for_the_tenant_s_other_submissions_and_for_no_other_tenant_s(
    rows: Rows, another: Open
) -> None:
    """A submission that is not committed yet may have taken the last place."""
    usage, other = limited(1), (await another()).connection
    await other.execute("SET lock_timeout = '50ms'")
    async with rows.connection.transaction():
        await rows.submit()
        await usage.check_exactly(rows.connection, "t")
        await usage.check_exactly(other, "u")
        with pytest.raises(asyncpg.LockNotAvailableError):
            await usage.check_exactly(other, "t")
    await usage.check_exactly(other, "t")
