"""A verb changes its own job and nothing else: nothing of another tenant in any state, with a lease of the same worker,
nor of another job of the same tenant.
"""

from __future__ import annotations

import pytest

from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.states import TaskState
from leasehold.transitions import claims, jobs, settlements, sweeps
from leasehold.transitions.settlements import Completion, Failure
from tests.factories import THREE, Rows
from tests.transitions.test_matrix import put_into
from tests.transitions.test_not_due import VERBS, Prepare, Work, _relay, _relay_batch

TABLES = ("job", "task", "event", "outbox", "outbox_batch", "output", "failure", "result", "note", "unknown_task",
          "gate", "gate_job", "progress")  # fmt: skip


async def _expire_lease(rows: Rows) -> Work:
    claimed = await rows.leased()
    await rows.lapse(claimed.lease.task_id)
    return lambda: sweeps.expire_leases(rows.connection, [], 5)


async def _lose(rows: Rows) -> Work:
    claimed = await rows.leased(THREE)
    await rows.lapse(claimed.lease.task_id)
    return lambda: sweeps.expire_leases(rows.connection, [], 0)


async def _fail_for_good(rows: Rows) -> Work:
    lease = (await rows.leased(THREE)).lease
    return lambda: settlements.fail(rows.connection, [Failure(lease, "error", "x", "", False, 0.0)])


async def _cancel_what_waits(rows: Rows) -> Work:
    (hint,) = await rows.submit(THREE)
    job_id = (await rows.task(hint.hint.task_id))["job_id"]
    return lambda: jobs.request_cancel(rows.connection, [job_id], "t", reason="", by="test")


async def _rewind(rows: Rows) -> Work:
    claimed = await rows.leased(THREE)
    await settlements.complete(rows.connection, [Completion(claimed.lease)])
    return lambda: rows.connection.fetchval(jobs.REWIND, claimed.job_id, "a")


async def _take_over(rows: Rows) -> Work:
    claimed = await rows.leased()
    await rows.lapse(claimed.lease.task_id)
    return lambda: claims.claim(rows.connection, rows.terms, [claimed.lease.task_id])


async def _forget(rows: Rows) -> Work:
    claimed = await rows.leased()
    await settlements.complete(rows.connection, [Completion(claimed.lease)])
    await rows.connection.execute("UPDATE job SET expires_at = now() WHERE id = $1", claimed.job_id)
    return lambda: sweeps.forget_jobs(rows.connection, [claimed.job_id])


OWN = (_expire_lease, _lose, _fail_for_good, _cancel_what_waits, _rewind, _take_over, _forget)


async def bystanders(rows: Rows) -> list[str]:
    """Jobs with a task in each state, and one that waits at a limit; gives their ids."""
    ids = []
    for state in TaskState:
        job_id, lease = await put_into(rows, state)
        ids += [str(job_id), str(lease.task_id)]
    await rows.connection.execute("UPDATE task SET lease_until = now() + interval '1 hour' WHERE status = 'running'")
    async with rows.connection.transaction():
        hints = await rows.submit(limits=[ConcurrencyLimit("bystander", "tenant", at_most=1)])
    assert hints == []  # a job at a limit has no hint before it is admitted
    held = await rows.connection.fetchval("SELECT id FROM job WHERE held")
    ids += [str(held), str(await rows.connection.fetchval("SELECT id FROM task WHERE job_id = $1", held))]
    await rows.connection.execute("UPDATE job SET tenant_id = 'bystander'")
    await rows.connection.execute("UPDATE task SET tenant_id = 'bystander', queue = 'elsewhere'")
    await rows.connection.execute("UPDATE outbox SET queue = 'elsewhere', relay_at = now() + interval '1 hour'")
    await rows.connection.execute("UPDATE outbox_batch SET relay_at = now() + interval '1 hour'")
    return ids


async def state_of(rows: Rows, ids: list[str]) -> list[str]:
    """Every row that names one of the ids."""
    return [text for text in await everything(rows) if any(one in text for one in [*ids, '"bystander"'])]


#: The relay takes whatever is due, whoever wrote it.
OF_ONE = [verb for verb in VERBS if verb not in (_relay, _relay_batch)]


@pytest.mark.parametrize("verb", [*OF_ONE, *OWN], ids=lambda verb: verb.__name__.strip("_"))
async def test_a_verb_changes_nothing_of_anybody_else(rows: Rows, verb: Prepare) -> None:
    ids = await bystanders(rows)
    work = await verb(rows)
    before = await state_of(rows, ids)
    own = await everything(rows)
    await work()
    assert await state_of(rows, ids) == before
    unchanging = ("_hear",)  # asks only
    assert verb.__name__ in unchanging or await everything(rows) != own


async def everything(rows: Rows) -> list[str]:
    texts = []
    for table in TABLES:
        texts += [row[0] for row in await rows.connection.fetch(f"SELECT to_jsonb(x)::text FROM {table} x")]
    return sorted(texts)
