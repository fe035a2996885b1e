"""Clients that submit and cancel jobs in transactions of their own, by the platform's transitions. They use neither the
API nor the broker.
"""

from __future__ import annotations

import asyncio
import time
from uuid import UUID

import asyncpg

from chaos.load.client import AGAIN_SECONDS, PATIENCE_SECONDS
from chaos.load.diary import Diary, Sender
from chaos.pipelines import STOPPABLE
from chaos.stack import CLIENT
from leasehold.db.database import connect
from leasehold.domain.ids import new_id
from leasehold.domain.pipeline import Pipeline
from leasehold.domain.states import JobState
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.transitions.jobs import NewJob, request_cancel, submit

#: Errors after which the client tries again. Before the upgrade of F43, the schema is older than this client's code.
_AGAIN: tuple[type[BaseException], ...] = (*TRY_AGAIN, asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError)
# The cron expression fires on 29 February only. So during a chaos run the only tick is that of `next_run_at`.
_SCHEDULE = """
INSERT INTO schedule (id, tenant_id, template, cron, timezone, payload_template, scope, scope_id, priority, overlap,
                      catch_up, catch_up_seconds, next_run_at)
VALUES ($1::uuid, $2, 'short', '0 0 29 2 *', 'UTC', $3::jsonb, 'chaos', $1::uuid::text, 1, 'allow_all', 'one', 3600,
        clock_timestamp() + make_interval(secs => $4))
ON CONFLICT DO NOTHING
"""


def submitter(diary: Diary, pipeline: Pipeline) -> Sender:
    async def send(tenant: str) -> None:
        job = NewJob(pipeline, tenant, diary.words(), id=new_id())
        asked_at, tries = time.time(), 0
        answer = "unknown"
        while answer == "unknown" and time.time() - asked_at < PATIENCE_SECONDS:
            tries += 1
            answer = await _try_submit(diary, job)
        accepted = str(job.id) if answer == "accepted" else ""
        diary.record_direct(pipeline.name, tenant, str(job.id), asked_at, answer, accepted, tries)

    return send


async def _try_submit(diary: Diary, job: NewJob) -> str:
    """Submit the job once. Only the relay publishes its hints."""
    try:
        connection = await connect(diary.installation.settings(CLIENT), "client")
        try:
            await submit(connection, [job])
        finally:
            connection.terminate()
    except asyncpg.UniqueViolationError:
        return "accepted"  # an earlier try submitted it, and its answer was lost
    except _AGAIN:
        await asyncio.sleep(AGAIN_SECONDS)
        return "unknown"
    return "accepted"


def canceller(diary: Diary) -> Sender:
    """Submits jobs and cancels each a little later: before it starts, while it runs, or too late."""

    async def send(tenant: str) -> None:
        job = NewJob(diary.rng.choice(STOPPABLE), tenant, diary.words(), id=new_id())
        asked_at = time.time()
        while await _try_submit(diary, job) == "unknown":
            if time.time() - asked_at > PATIENCE_SECONDS:  # the client does not know whether the job exists
                diary.record_direct(job.pipeline.name, tenant, str(job.id), asked_at, "unknown", "", 1)
                return
        diary.record_direct(job.pipeline.name, tenant, str(job.id), asked_at, "accepted", str(job.id), 1)
        await asyncio.sleep(diary.rng.uniform(0.0, 1.5))
        asked_at, tries = time.time(), 0
        answer = "unknown"
        while answer == "unknown" and time.time() - asked_at < PATIENCE_SECONDS:
            tries += 1
            answer = await _try_cancel(diary, job)
        diary.record_direct("cancel", tenant, f"cancel {job.id}", asked_at, answer, str(job.id), tries)

    return send


async def _try_cancel(diary: Diary, job: NewJob) -> str:
    """Cancel the job once. Returns the value of `Request.answer`."""
    try:
        connection = await connect(diary.installation.settings(CLIENT), "client")
        try:
            cancels = await request_cancel(connection, [job.id], job.tenant_id, reason="chaos", by="client")
        finally:
            connection.terminate()
    except _AGAIN:
        await asyncio.sleep(AGAIN_SECONDS)
        return "unknown"
    answers = {JobState.CANCELLED: "accepted", JobState.CANCEL_REQUESTED: "stopping"}
    return answers.get(cancels.states[job.id], "refused") if job.id in cancels.states else "refused"


def scheduler(diary: Diary) -> Sender:
    """Makes schedules with one tick a few seconds later."""

    async def send(tenant: str) -> None:
        schedule, asked_at, tries = new_id(), time.time(), 0
        words, moment = diary.words(), diary.rng.uniform(0.0, 5.0)
        answer = "unknown"
        while answer == "unknown" and time.time() - asked_at < PATIENCE_SECONDS:
            tries += 1
            answer = await _try_schedule(diary, schedule, tenant, words, moment)
        diary.record_direct("scheduled", tenant, str(schedule), asked_at, answer, "", tries)

    return send


async def _try_schedule(diary: Diary, schedule: UUID, tenant: str, words: dict[str, str], moment: float) -> str:
    try:
        connection = await connect(diary.installation.settings(CLIENT), "client")
        try:
            await connection.execute(_SCHEDULE, schedule, tenant, words, moment)
        finally:
            connection.terminate()
    except TRY_AGAIN:
        await asyncio.sleep(AGAIN_SECONDS)
        return "unknown"
    return "accepted"
