"""A verb changes its own job only, though its tenant and another one have jobs of the same names in the same state."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest

from leasehold.db.database import Connection
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.states import JobState
from leasehold.transitions import jobs, settlements, streams, sweeps
from leasehold.transitions.jobs import AdmissionTerms, RunOf, resolving
from leasehold.transitions.settlements import Completion, Failure, FanningOut, Output, Part
from tests.factories import THREE, Rows, assert_history


@dataclass(frozen=True, slots=True)
class Job:
    """`tasks`: by the name of the step."""

    id: UUID
    tasks: dict[str, UUID]


async def failed(rows: Rows, tenant: str = "t") -> Job:
    """A failed job: `a` has succeeded, and `b` has fanned out. `part.0` has succeeded, and `part.1` has failed. Each
    step has a note, and each that ran to its end has an output, a result and a piece of a stream.
    """
    first = await rows.leased(THREE, tenant=tenant, run=RunOf("template", 1, "scope", "1"), params={"n": 1})
    await succeed(rows, first)
    (spreading,) = await rows.claim_all()
    parts = [Part("part", "default", 1, "three.b", number) for number in range(2)]
    await settlements.fan_out(rows.connection, [FanningOut(spreading.lease, parts)])
    done, failing = sorted(await rows.claim_all(), key=lambda part: part.step)
    await succeed(rows, done)
    await rows.connection.execute(
        "INSERT INTO note (task_id, value) SELECT id, '{\"sent\": true}' FROM task WHERE job_id = $1", first.job_id
    )
    await settlements.fail(rows.connection, [Failure(failing.lease, "error", "bad", "no", False, 0.0)])
    tasks = await rows.connection.fetch("SELECT step, id FROM task WHERE job_id = $1", first.job_id)
    return Job(first.job_id, {row["step"]: row["id"] for row in tasks})


async def succeed(rows: Rows, claimed: Any) -> None:
    await streams.append(rows.connection, [streams.StreamChunk(claimed.lease, 1, [b'{"chunk": 1}'], restarts=False)])
    output = Output(claimed.step, "key", 1, "00", "text/plain")
    await settlements.complete(rows.connection, [Completion(claimed.lease, [output], {"step": claimed.step})])


async def unlike(rows: Rows, job: Job) -> list[str]:
    """Every row of the database that does not name this job or a task of it."""
    tables = await rows.connection.fetch(
        "SELECT c.oid::regclass::text AS name FROM pg_class c"
        " WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition"
    )
    texts: list[str] = []
    for table in tables:
        texts += [
            f"{table['name']} {row[0]}"
            for row in await rows.connection.fetch(f"SELECT to_jsonb(x)::text FROM {table['name']} x")
        ]
    own = [str(job.id), *map(str, job.tasks.values())]
    return sorted(text for text in texts if not any(one in text for one in own))


async def _resolve(connection: Connection, job: Job) -> Any:
    return await jobs.resolve(connection, job.id, "t", "part.1", {"known": True}, "anna")


async def _lock(connection: Connection, job: Job) -> Any:
    return await resolving.lock(connection, job.id, "t", "part.1", "sent")


async def _forget_note(connection: Connection, job: Job) -> Any:
    found = await _lock(connection, job)
    if found is None or found.job_status is not JobState.FAILED:
        return None
    await resolving.forget_note(connection, found)
    return found


async def _replay(connection: Connection, job: Job, **options: Any) -> bool:
    return await jobs.replay(connection, job.id, "t", **options) is not None


async def _replay_limited(connection: Connection, job: Job) -> Any:
    terms = AdmissionTerms([ConcurrencyLimit("t", "k", at_most=1)], "key")
    return await _replay(connection, job, params={"n": 2}, terms=terms)


Verb = Callable[[Connection, Job], Awaitable[Any]]
FOR_A_FAILED_JOB: dict[str, Verb] = {
    "replay": _replay,
    "replay from a": lambda c, job: _replay(c, job, from_step="a"),
    "replay from b": lambda c, job: _replay(c, job, from_step="b"),
    "replay from a part": lambda c, job: _replay(c, job, from_step="part.0"),
    "replay at a limit": _replay_limited,
    "replay together": lambda c, job: jobs.replay_together(c, [job.id], "t"),
    "resolve": _resolve,
    "forget the note": _forget_note,
}
FOR_AN_ENDED_JOB: dict[str, Verb] = {
    "delete": lambda c, job: jobs.delete(c, job.id, "t"),
    "delete together": lambda c, job: jobs.delete_together(c, [job.id], "t"),
    "expire early": lambda c, job: jobs.expire_early(c, job.id, "t"),
}
VERBS = FOR_A_FAILED_JOB | FOR_AN_ENDED_JOB


@pytest.mark.parametrize("verb", VERBS)
async def test_jobs_of_the_same_names_stay_as_they_are(rows: Rows, verb: str) -> None:
    own, twins = await failed(rows), [await failed(rows), await failed(rows, "other")]
    before = await unlike(rows, own)
    assert await VERBS[verb](rows.connection, own)
    after = [text for text in await unlike(rows, own) if not text.startswith(("gate ", "tombstone "))]
    assert after == [text for text in before if not text.startswith(("gate ", "tombstone "))]
    for twin in twins:
        assert (await rows.job(twin.id))["status"] == "failed"


@pytest.mark.parametrize("verb", VERBS)
async def test_a_job_of_another_tenant_is_not_there(rows: Rows, verb: str) -> None:
    job, nobody = await failed(rows, "other"), Job(UUID(int=0), {})
    await failed(rows)
    before = await unlike(rows, nobody)
    assert not await VERBS[verb](rows.connection, job)
    assert await unlike(rows, nobody) == before


async def _cancelled(rows: Rows) -> Job:
    """Cancelled by a person while `part.1` was about to run."""
    job = await failed(rows)
    await jobs.replay(rows.connection, job.id, "t")
    await jobs.request_cancel(rows.connection, [job.id], "t", reason="r", by="b")
    assert (await rows.job(job.id))["status"] == "cancelled"
    return job


async def _running(rows: Rows) -> Job:
    """Retried. `part.1` is due: a second retry must not make it due once more."""
    job = await failed(rows)
    await jobs.replay(rows.connection, job.id, "t")
    await rows.claim_all()
    return job


async def _expired(rows: Rows) -> Job:
    """Past its retention: its objects may be deleted."""
    job = await failed(rows)
    await jobs.expire_early(rows.connection, job.id, "t")
    return job


NOT_RETRYABLE = {"cancelled": _cancelled, "running": _running, "expired": _expired}


@pytest.mark.parametrize("verb", FOR_A_FAILED_JOB)
@pytest.mark.parametrize("state", NOT_RETRYABLE)
async def test_only_a_failed_job_that_is_kept_goes_on(rows: Rows, verb: str, state: str) -> None:
    job, nobody = await NOT_RETRYABLE[state](rows), Job(UUID(int=0), {})
    before = await unlike(rows, nobody)
    assert not await FOR_A_FAILED_JOB[verb](rows.connection, job)
    assert await unlike(rows, nobody) == before


async def test_only_an_ended_job_is_deleted(rows: Rows) -> None:
    """A job that runs is deleted after its end: until then nobody may delete its objects."""
    running, nobody = await _running(rows), Job(UUID(int=0), {})
    before = await unlike(rows, nobody)
    assert await jobs.delete(rows.connection, running.id, "t") is None
    assert await jobs.delete_together(rows.connection, [running.id], "t") == []
    assert await unlike(rows, nobody) == before
    assert await jobs.expire_early(rows.connection, running.id, "t") is None
    assert await sweeps.forgettable_jobs(rows.connection) == []
    assert (await rows.job(running.id))["keep_seconds"] == 0


async def test_of_jobs_that_are_retried_together_those_that_cannot_stay_and_the_others_go_on(rows: Rows) -> None:
    retried, foreign = [await failed(rows) for _ in range(2)], await failed(rows, "other")
    others = [await _cancelled(rows), await _expired(rows), foreign]
    expected = [await rows.job(other.id) for other in others]
    everyone = [job.id for job in (*retried, *others)]
    hints = await jobs.replay_together(rows.connection, everyone, "t")
    assert {hint.hint.task_id for hint in hints} == {job.tasks["part.1"] for job in retried}
    assert [await rows.job(other.id) for other in others] == expected
    for job in retried:
        assert await rows.statuses(job.id) == {
            "a": "succeeded", "b": "blocked", "c": "blocked", "part.0": "succeeded", "part.1": "pending",
        }  # fmt: skip
        await assert_history(rows, job.id)
