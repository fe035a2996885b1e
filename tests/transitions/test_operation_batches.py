"""A bulk operation takes those jobs of a batch that are its targets: of the tenant, of that time, and in the state that
its action needs. It counts its own canary jobs, and keeps its own report.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from leasehold.transitions import operations, settlements
from leasehold.transitions.operations import Refusal
from leasehold.transitions.settlements import Completion, Failure
from tests.factories import Rows
from tests.transitions.conftest import Open
from tests.transitions.test_limits_beside_others import wait_for_no_lock

#: When the operation was submitted.
AT = datetime.now(UTC) - timedelta(hours=1)
#: Name -> what its job has otherwise than a job that was created and failed before the operation. `of tenant u` and
#: `not named`: the caller takes these names to mean what they say.
JOBS = {
    "before": "",
    "just then": "created_at = $2, finished_at = $2",
    "later": "finished_at = $2 + interval '1 second'",
    "created later": "created_at = $2 + interval '1 second', finished_at = $2 + interval '1 second'",
    "past its retention": "expires_at = clock_timestamp()",
    "kept": "expires_at = clock_timestamp() + interval '1 hour'",
    "succeeded": "status = 'succeeded'",
    "running": "status = 'running', finished_at = NULL",
    "running since then": "status = 'running', finished_at = NULL, created_at = $2",
    "running later": "status = 'running', finished_at = NULL, created_at = $2 + interval '1 second'",
    "being cancelled": "status = 'cancel_requested', finished_at = NULL",
    "failed of tenant u": "tenant_id = 'u'",
    "running of tenant u": "tenant_id = 'u', status = 'running', finished_at = NULL",
    "failed, not named": "",
    "running, not named": "status = 'running', finished_at = NULL",
}
FAILED = {"before", "just then", "kept"}
RUNNING = {"running", "running since then"}
TARGETS = {
    "retry": FAILED,
    "cancel": RUNNING,
    "delete": FAILED | RUNNING | {"later", "succeeded", "being cancelled"},
}


async def jobs_of_all_kinds(rows: Rows) -> dict[UUID, str]:
    made = {}
    for name, changes in JOBS.items():
        job_id = (await rows.leased()).job_id
        made[job_id] = name
        await rows.connection.execute(
            "UPDATE job SET status = 'failed', created_at = $2::timestamptz - interval '2 seconds',"
            " finished_at = $2::timestamptz - interval '1 second' WHERE id = $1",
            job_id,
            AT,
        )
        if changes:
            await rows.connection.execute(
                f"UPDATE job SET {changes} WHERE id = $1 AND $2::timestamptz IS NOT NULL", job_id, AT
            )
        await rows.connection.execute("UPDATE task SET queue = $2 WHERE job_id = $1", job_id, f"queue of {name}")
    return made


@pytest.mark.parametrize("action", TARGETS)
async def test_an_operation_takes_its_targets_and_leaves_those_that_another_transaction_holds(
    rows: Rows, another: Open, action: str
) -> None:
    """It says which these are. What is no target is neither taken nor said to be held."""
    made = await jobs_of_all_kinds(rows)
    named = [job_id for job_id, name in made.items() if "not named" not in name]
    held = next(job_id for job_id, name in made.items() if name in TARGETS[action])
    other = await another()
    await wait_for_no_lock(rows)
    async with other.connection.transaction():
        await other.connection.execute("SELECT FROM job WHERE id = $1 FOR UPDATE", held)
        async with rows.connection.transaction():
            taken, busy = await operations.lock(rows.connection, action, named, "t", AT)
            unlocked = await other.connection.fetch("SELECT id FROM job FOR UPDATE SKIP LOCKED")
    assert {made[row["id"]]: row["queue"] for row in taken} == {
        name: f"queue of {name}" for name in TARGETS[action] - {made[held]}
    }
    assert [row["id"] for row in taken] == sorted(row["id"] for row in taken)
    assert busy == [held]
    assert {row["id"] for row in unlocked} == made.keys() - {row["id"] for row in taken}


async def test_a_canary_counts_the_jobs_that_it_names_and_of_a_retry_those_that_did_not_succeed(rows: Rows) -> None:
    made = {name: job_id for job_id, name in (await jobs_of_all_kinds(rows)).items()}
    named = [made[name] for name in ("succeeded", "running", "running later", "being cancelled", "before", "kept")]
    theirs = [made["failed of tenant u"], made["running of tenant u"]]

    async def count(action: str, of_tenant: str | None) -> tuple[int, int]:
        return await operations.canary(rows.connection, named + theirs, of_tenant, action)

    assert await count("retry", "t") == (3, 2)
    assert await count("retry", "u") == (1, 1)
    assert await count("retry", None) == (4, 3)
    assert await count("cancel", None) == (4, 0)


async def test_an_attempt_failed_because_of_the_canary_if_it_failed_itself_and_with_such_a_code(rows: Rows) -> None:
    stopped, broken, fine = [(await rows.leased()).lease for _ in range(3)]
    failures = [Failure(stopped, "error", "canary", "", False, 0.0), Failure(broken, "error", "bad", "", False, 0.0)]
    await settlements.fail(rows.connection, failures)
    await settlements.complete(rows.connection, [Completion(fine)])
    asked = [await operations.has_failed(rows.connection, one.task_id, ["canary"]) for one in (stopped, broken, fine)]
    assert asked == [True, False, False]
    assert await operations.has_failed(rows.connection, broken.task_id, ["canary", "bad"])


async def test_a_job_that_is_reported_again_keeps_its_first_refusal_and_the_others_are_reported(rows: Rows) -> None:
    """As when a worker repeats a batch whose commit it did not see."""
    operation, another_operation, job, another_job = [(await rows.leased()).job_id for _ in range(4)]
    refusal: Callable[..., Refusal] = lambda one, code: Refusal(one, code, "a sentence")  # noqa: E731
    await operations.record(rows.connection, operation, "t", [refusal(job, "first")])
    await operations.record(rows.connection, operation, "t", [refusal(job, "second"), refusal(another_job, "second")])
    await operations.record(rows.connection, another_operation, "t", [refusal(job, "third")])
    reported = await rows.connection.fetch("SELECT operation_id, job_id, code FROM operation_refusal ORDER BY at, code")
    assert {(row["operation_id"], row["job_id"]): row["code"] for row in reported} == {
        (operation, job): "first",
        (operation, another_job): "second",
        (another_operation, job): "third",
    }
