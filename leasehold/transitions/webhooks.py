"""Writes the deliveries about jobs that have ended. An ended job gets a delivery job for each webhook that subscribes
to its event, and one for its own callback URL. One transaction writes the delivery jobs and clears the job's column
`notify`, which says that the end of the job must still be reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg

from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection
from leasehold.domain.pipeline import Pipeline
from leasehold.telemetry.duties import counted
from leasehold.transitions.jobs import NewJob, RunOf, submit
from leasehold.transitions.limits import TenantRules, applicable_limits, tenant_rules
from leasehold.transitions.quarantine import not_in, run_units

#: The name of this duty (a loop of the workers). If the deliveries of a job cannot be written, the job is set aside for
#: a time, with this name in the table `quarantine`. `counted` also creates the duty's counters.
DUTY = counted("webhooks")


@dataclass(frozen=True, slots=True)
class ReportedJobs:
    """The jobs whose ends webhooks report. `kinds`: pipeline -> the kind of its jobs, such as `picture`; jobs of other
    pipelines are runs. `own`: the platform's own pipelines, whose jobs webhooks do not report.
    """

    kinds: Mapping[str, str] = field(default_factory=dict)
    own: frozenset[str] = frozenset({"webhook"})


# SQL that is true in three cases. A worker has the code of the job `j`. Or a worker may have the code, because its
# handlers are not recorded (`handlers` is NULL). Or a worker with the code has ended within the last 90 days
# (`known_handler`, see workers.py). The name of a handler is `pipeline.step`.
_MAY_BE_KNOWN = """EXISTS (
           SELECT 1 FROM worker w WHERE w.handlers IS NULL
           OR EXISTS (SELECT 1 FROM unnest(w.handlers) AS h(name) WHERE starts_with(h.name, j.pipeline || '.')))
         OR EXISTS (SELECT 1 FROM known_handler k WHERE starts_with(k.name, j.pipeline || '.'))"""

# Locks ended jobs whose deliveries are not written yet, and reads what the deliveries need.
# $1: at most this many jobs. $2: only this job, even if it is set aside; NULL: all jobs that are not set aside.
# $3: the pipelines whose code this process has; NULL: failed jobs of any pipeline may be taken. $4: the pipelines that
# have an `on_failure` pipeline. $5: true if the caller deletes the job, so that the job's retention ends now.
#
# The statement leaves a failed job of another app (its pipeline is `APP.TASK`) to a worker with that app's code. The
# reason: a run of the job's `on_failure` pipeline may have to follow, and only that app's code names this pipeline.
# After the end of the job's retention, any worker takes the job if no worker has or had the code. From half a day after
# that end, any worker takes the job in any case, because retention waits for the deliveries for a day at most.
_ENDED = f"""
-- webhooks_due
SELECT j.id, j.tenant_id, j.status, j.error, j.finished_at, j.pipeline, r.template, r.version, r.scope, r.scope_id,
       CASE WHEN j.pipeline = ANY($4::text[]) AND j.error IS NOT NULL THEN j.params END AS params,
       (SELECT jsonb_object_agg(g.name, g.value) FROM job_tag g WHERE g.job_id = j.id) AS tags,
       (SELECT c.url FROM job_callback c WHERE c.job_id = j.id AND c.tenant_id = j.tenant_id) AS callback_url
FROM job j LEFT JOIN run r ON r.job_id = j.id
WHERE j.notify AND j.finished_at IS NOT NULL
  AND ($3::text[] IS NULL OR j.error IS NULL OR position('.' IN j.pipeline) = 0 OR j.pipeline = ANY($3)
       OR (($5 OR j.expires_at < clock_timestamp()) AND NOT ({_MAY_BE_KNOWN}))
       OR j.expires_at < clock_timestamp() - interval '12 hours')
  AND CASE WHEN $2::uuid IS NULL THEN {not_in(DUTY, "j.id")} ELSE j.id = $2 END
ORDER BY j.finished_at LIMIT $1
FOR UPDATE OF j SKIP LOCKED
"""

_LOCK = "SELECT 1 FROM job WHERE id = $1 FOR UPDATE"

_ENABLED_WEBHOOKS = "SELECT id, tenant_id, events FROM webhook WHERE enabled AND tenant_id = ANY($1::text[])"

_CLEAR_NOTIFY = "UPDATE job SET notify = false WHERE id = ANY($1::uuid[])"

# Records for each job ($1) the delivery job ($2) that calls its callback URL.
_RECORD_CALLBACKS = """
-- webhooks_called_back
UPDATE job_callback c SET delivery_id = n.delivery_id
FROM unnest($1::uuid[], $2::uuid[]) AS n(job_id, delivery_id)
WHERE c.job_id = n.job_id
"""

# Sets `notify` of the next $3 unfinished jobs of the tenant $1, in the order of their ids after $2. They were submitted
# before the tenant had a webhook. The jobs of the pipelines $4 are left out, unless they are runs. Returns the last id,
# or no row if no job is left.
_WATCH = """
-- webhooks_watch
WITH unwatched AS MATERIALIZED (
    SELECT j.id FROM job j
    WHERE j.tenant_id = $1 AND j.finished_at IS NULL AND j.id > $2 AND NOT j.notify
      AND NOT (j.pipeline = ANY($4::text[]) AND NOT EXISTS (SELECT 1 FROM run r WHERE r.job_id = j.id))
    ORDER BY j.id LIMIT $3 FOR UPDATE OF j
), watched AS (
    UPDATE job j SET notify = true FROM unwatched WHERE j.id = unwatched.id
)
SELECT id FROM unwatched ORDER BY id DESC LIMIT 1
"""
#: `watch` locks at most this many rows at a time.
_BATCH = 500


async def watch(connection: Connection, tenant_id: str, reported_jobs: ReportedJobs = ReportedJobs()) -> None:
    """Make the tenant's webhook also report the ends of jobs that were submitted before the webhook existed. Call this
    after the commit of the webhook, and outside a transaction, so that only a few rows are locked at a time. Call this
    also before the commit, so that only a few jobs are left for the call after the commit.

    A submission first reads whether the tenant has a webhook, and then writes its job. If the submission reads before
    the webhook's commit, and commits after this call, the webhook does not report the end of the job. A lock could
    prevent this, but each submission would pay for the lock.
    """
    last: UUID | None = UUID(int=0)
    while last is not None:
        last = await connection.fetchval(_WATCH, tenant_id, last, _BATCH, sorted(reported_jobs.own))


async def dispatch(
    connection: Connection,
    delivery_pipeline: Pipeline,
    keep_seconds: int,
    reported_jobs: ReportedJobs = ReportedJobs(),
    *,
    limit: int = 100,
    job_id: UUID | None = None,
    pipelines: Iterable[Pipeline] | None = None,
    deletes: bool = False,
) -> tuple[list[Announcement], bool]:
    """Write the deliveries of each ended job, or of `job_id` alone, and the `on_failure` runs of failed jobs. Returns
    the hints to be published (messages that tell workers of due tasks), and whether more than `limit` jobs may have
    ended. A job whose deliveries cannot be written delays no other job.

    `pipelines`: the pipelines of this process. The call leaves a failed job of another app to a process with that app's
    code. It does so until the job's retention ends or, if a worker may have the code, until half a day later. None: the
    call takes the jobs of all apps, and no `on_failure` run follows.

    `job_id`: the caller will change this job's row in the same transaction. So its deliveries are written now,
    whichever app the job belongs to, and even if the job is set aside after a failure. The call waits until other
    transactions have released the row. If the deliveries cannot be written, the call raises the error.

    `deletes`: the caller deletes the job `job_id`. Then two rules of `job_id` do not hold, because a deleted row is
    only hidden, and stays while `notify` is set, so its deliveries can be written later. The call leaves a failed job
    of another app to a process with that app's code, if a worker may have this code. And if the deliveries cannot be
    written, the call leaves them for later, and raises no error.
    """
    if job_id is not None:
        await connection.execute(_LOCK, job_id)
    own_pipelines = list(pipelines or ())
    # `own_names`: a failed job of an app is taken only if this list has its pipeline. None: failed jobs of any app are
    # taken.
    is_any_app = pipelines is None or (job_id is not None and not deletes)
    own_names = None if is_any_app else [pipeline.name for pipeline in own_pipelines]
    # The name of a pipeline -> the pipeline whose run follows when a run fails.
    follower_of = {pipeline.name: pipeline.on_failure for pipeline in own_pipelines if pipeline.on_failure is not None}

    is_full = False  # a statement has taken `limit` jobs, so more may have ended

    # Locks and reads jobs that have ended. `run_units` calls this with None for all due jobs together. If it cannot
    # write their deliveries, it calls this for each job by itself (`only`: the id of the job).
    async def take(only: object | None) -> list[asyncpg.Record]:
        nonlocal is_full
        ended = await connection.fetch(
            _ENDED, limit, job_id if only is None else only, own_names, list(follower_of), deletes
        )
        is_full = is_full or len(ended) == limit
        return ended

    async def write_deliveries(ended: Sequence[asyncpg.Record]) -> list[Announcement]:
        # Writes three kinds of jobs: deliveries to webhooks, `on_failure` runs, and deliveries to callback URLs.
        webhooks = await connection.fetch(_ENABLED_WEBHOOKS, sorted({job["tenant_id"] for job in ended}))
        new_jobs = [
            NewJob(delivery_pipeline, job["tenant_id"], params=params, keep_seconds=keep_seconds)
            for job in ended
            for params in _deliveries(job, webhooks, reported_jobs)
        ]
        # `params` is set only if the job failed and its pipeline has an `on_failure` pipeline.
        failed = [job for job in ended if job["params"] is not None]
        rules = await tenant_rules(connection, {job["tenant_id"] for job in failed}) if failed else {}
        new_jobs += [
            _follower(follower_of[job["pipeline"]], job, keep_seconds, rules[job["tenant_id"]]) for job in failed
        ]
        callbacks = {
            job["id"]: NewJob(
                delivery_pipeline, job["tenant_id"], params=_callback(job, reported_jobs), keep_seconds=keep_seconds
            )
            for job in ended
            if job["callback_url"] is not None
        }
        new_jobs += callbacks.values()
        hints = await submit(connection, new_jobs) if new_jobs else []
        if callbacks:
            delivery_ids = [delivery.id for delivery in callbacks.values()]
            await connection.execute(_RECORD_CALLBACKS, list(callbacks), delivery_ids)
        await connection.execute(_CLEAR_NOTIFY, [job["id"] for job in ended])
        return hints

    if job_id is not None and not deletes:
        # The caller changes the row next. If the deliveries cannot be written, the error must undo the caller's
        # transaction, because otherwise the deliveries would be lost with the row's old values.
        ended = await take(None)
        return await write_deliveries(ended) if ended else [], is_full
    hints = await run_units(connection, DUTY, take, write_deliveries, key=lambda job: job["id"])
    return hints, is_full


def _follower(pipeline: Pipeline, job: Any, keep_seconds: int, rules: TenantRules) -> NewJob:
    """The run that follows a failed run (`job`). Its parameters are the fields of leasehold.app.failed.Failed. Like
    other runs, it waits at its concurrency limits, and webhooks report its end. `rules`: the rules of the job's tenant.
    """
    error = job["error"]
    params = {
        "run_id": str(job["id"]), "task": job["pipeline"], "code": error["code"], "message": error["message"],
        "arguments": job["params"],
    }  # fmt: skip
    run = RunOf(pipeline.name, pipeline.version, "tenant", "")  # in the default scope of runs
    return NewJob(
        pipeline,
        job["tenant_id"],
        params=params,
        keep_seconds=keep_seconds,
        limits=applicable_limits(rules.limits, job["tenant_id"], pipeline, params),
        notify=rules.watched or pipeline.on_failure is not None,
        run=run,
    )


def _deliveries(job: Any, webhooks: Sequence[Any], reported_jobs: ReportedJobs) -> list[dict[str, Any]]:
    """The parameters of the deliveries about one job. There is one delivery for each event and each webhook of the
    job's tenant that subscribes to the event.
    """
    if job["template"] is None and job["pipeline"] in reported_jobs.own:
        return []
    return [
        {"webhook_id": str(webhook["id"]), "event": event}
        for webhook in webhooks
        if webhook["tenant_id"] == job["tenant_id"]
        for event in _events(job, reported_jobs)
        if event["type"] in webhook["events"]
    ]


def _callback(job: Any, reported_jobs: ReportedJobs) -> dict[str, Any]:
    """The parameters of the delivery to the job's callback URL. The delivery sends the event `job.*`."""
    event, *_ = _events(job, reported_jobs)
    return {"url": job["callback_url"], "event": event}


def _events(job: Any, reported_jobs: ReportedJobs) -> list[dict[str, Any]]:
    """The messages about the end of a job: `job.*` and, for a run, also `run.*`."""
    is_run = job["template"] is not None
    data = {"id": str(job["id"]), "status": job["status"], "error": job["error"]}
    run = {name: job[name] for name in ("template", "version", "scope", "scope_id")} if is_run else {}
    kind = "run" if is_run else reported_jobs.kinds.get(job["pipeline"], "run")
    job_fields = {"kind": kind, "template": job["template"] or job["pipeline"], "tags": job["tags"] or {}}
    contents = {f"job.{job['status']}": run | job_fields | data}
    if is_run:
        contents[f"run.{job['status']}"] = run | data
    return [message(name, job["finished_at"], content) for name, content in contents.items()]


def message(name: str, at: datetime, data: Mapping[str, Any]) -> dict[str, Any]:
    """A message to a webhook, in the form of Standard Webhooks."""
    return {"type": name, "timestamp": at.isoformat(), "data": data}


async def disable(
    connection: Connection, webhook_id: UUID, tenant_id: str, url: str, disabled_at: datetime | None, reason: str
) -> bool:
    """Disable the webhook if its URL is still `url`, and if nobody has disabled it since the caller read `disabled_at`.
    Returns whether this call has disabled the webhook.
    """
    status = await connection.execute(
        "UPDATE webhook SET enabled = false, disabled_because = $4, disabled_at = clock_timestamp()"
        " WHERE id = $1 AND tenant_id = $2 AND url = $3 AND disabled_at IS NOT DISTINCT FROM $5",
        webhook_id,
        tenant_id,
        url,
        reason,
        disabled_at,
    )
    return status != "UPDATE 0"


async def find(connection: Connection, webhook_id: UUID, tenant_id: str) -> Any:
    """The webhook's row, or None."""
    return await connection.fetchrow("SELECT * FROM webhook WHERE id = $1 AND tenant_id = $2", webhook_id, tenant_id)
