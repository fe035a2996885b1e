"""Reads jobs of every kind, for the API and the console: a job, the reasons for its wait, its ledger (the events of its
tasks), and dead letters. Each read is one statement.

Every query has the tenant as a parameter. Some functions also accept None (`tenant_id: str | None`), for an operator of
the installation. With None, the query reads the jobs of all tenants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias
from uuid import UUID

import asyncpg

from leasehold.db.database import Connection, in_index_order, within_minute

Row: TypeAlias = asyncpg.Record

#: An answer about one job has at most this many steps, attempts of each step, and outputs.
MAX_STEPS, MAX_ATTEMPTS, MAX_OUTPUTS = 1000, 20, 1000
#: The ledger of a job has at most this many events, which are the latest.
MAX_LEDGER = 5000

#: Tasks of a queue, and jobs at a limit, are counted up to this number. A count of MAX_COUNTED means "MAX_COUNTED or
#: more".
MAX_COUNTED = 10_000

#: `dead_letter_groups` groups the latest dead letters, at most this many.
MAX_GROUPED = 10_000
#: A page of dead letters searches at most MAX_SEARCHED failed steps, even if few of them match the filter. And
#: `dead_letter_groups` searches at most _MAX_SEARCHED_BY_GROUPS failed steps.
MAX_SEARCHED, _MAX_SEARCHED_BY_GROUPS = 10_000, 100_000

#: SQL: the columns of a job `j` and, if the job is a run, of its run `r`. `job_lists` reads the same columns.
COLUMNS = """
j.id, j.tenant_id, j.pipeline, j.pipeline_version, j.status, j.priority, j.error, j.cancel, j.created_at, j.started_at,
j.finished_at, j.deadline_at, j.expires_at, j.event_seq, j.held, j.dedupe_key, j.keep_seconds,
r.job_id IS NOT NULL AS is_run, r.template, r.version, r.scope, r.scope_id, r.scheduled_at, r.schedule_id, r.tick,
r.rerun_of, (j.cancel ->> 'at')::timestamptz AS cancel_requested_at,
(SELECT jsonb_object_agg(g.name, g.value) FROM job_tag g WHERE g.job_id = j.id) AS tags
"""
#: SQL condition: the job `j` is not deleted and not past its retention. Once a job is past its retention, its objects
#: may be deleted at any moment, so no query shows it.
LIVES = "(j.expires_at IS NULL OR j.expires_at > clock_timestamp())"

#: SQL condition: the job `j` with its run `r` is no bulk operation, or acts only on jobs of its own tenant. An
#: operator's bulk operation may act on jobs of other tenants. The errors of such an operation are about these jobs, so
#: only operators may see the operation.
OF_OWN_TENANT = "(r.job_id IS NOT NULL OR j.pipeline <> 'bulk_operation' OR j.params ->> 'of_tenant' = j.tenant_id)"

# The job $1 of the tenant $2 (NULL: of any tenant), in one row. `contained`: a workflow has started the step. Contained
# steps and their outputs are chosen last. So the answer always has the workflow's own step and its outputs, even if the
# answer cannot hold all contained steps. `limits`: the keys of the concurrency limits at which the job waits
# (`gate_job` has a row for each job and limit). The statement cuts off the digest of a payload's value at the end of a
# key, and leaves out the limits that only make runs of the same scope wait for each other.
FIND = f"""
-- job_find
SELECT {COLUMNS}, j.params, j.output_prefix, j.exclusive_key,
    greatest(j.created_at, j.started_at, j.finished_at, (j.cancel ->> 'at')::timestamptz,
             (SELECT e.at FROM history e WHERE e.job_id = j.id ORDER BY e.seq DESC LIMIT 1)) AS updated_at,
    (SELECT jsonb_agg(jsonb_build_object(
        'id', t.step, 'state', t.status, 'attempt', t.attempt, 'max_attempts', t.max_attempts, 'task_id', t.id,
        'queue', t.queue, 'started_at', t.started_at, 'finished_at', t.finished_at,
        'available_at', nullif(t.available_at, 'infinity'),
        'worker', t.lease_owner, 'percent', p.percent, 'summary', p.summary,
        'result', (SELECT x.value FROM result x WHERE x.task_id = t.id),
        'attempts', (SELECT jsonb_agg(jsonb_build_object('epoch', f.epoch, 'cause', f.cause, 'code', f.code,
                            'message', f.message, 'retryable', f.retryable, 'at', f.at) ORDER BY f.epoch)
                     FROM (SELECT * FROM failure WHERE task_id = t.id ORDER BY epoch DESC
                           LIMIT {MAX_ATTEMPTS}) AS f)
     ) ORDER BY t.position, t.step)
     FROM (SELECT * FROM task WHERE job_id = j.id ORDER BY contained, position, step LIMIT {MAX_STEPS}) AS t
     LEFT JOIN progress p ON p.task_id = t.id) AS steps,
    (SELECT jsonb_agg(jsonb_build_object('step', o.step, 'name', o.name, 'key', o.key, 'size', o.size,
        'sha256', o.sha256, 'content_type', o.content_type) ORDER BY o.contained, o.step, o.name)
     FROM (SELECT x.*, (SELECT t.contained FROM task t WHERE t.id = x.task_id) AS contained FROM output x
           WHERE x.job_id = j.id ORDER BY contained, x.step, x.name LIMIT {MAX_OUTPUTS}) AS o) AS outputs,
    (SELECT jsonb_build_object('url', c.url, 'id', delivery.id, 'status', delivery.status)
     FROM job_callback c LEFT JOIN job delivery ON delivery.id = c.delivery_id AND delivery.tenant_id = c.tenant_id
     WHERE c.job_id = j.id) AS callback,
    (SELECT jsonb_agg(regexp_replace(g.key, '=[0-9a-f]{{40}}$', '') ORDER BY g.key) FROM gate_job g
     WHERE g.job_id = j.id AND g.admitted_at IS NULL AND NOT starts_with(g.key, 'scope:')) AS limits
FROM job j LEFT JOIN run r ON r.job_id = j.id
WHERE j.id = $1 AND ($2::text IS NULL OR j.tenant_id = $2) AND {LIVES}
"""


async def find_job(connection: Connection, tenant_id: str | None, job_id: UUID) -> Row | None:
    """The job with its steps and outputs. None: there is no such job, another tenant has it, or it is deleted."""
    return await connection.fetchrow(FIND, job_id, tenant_id)


# $1: the ids of the jobs. $2: the tenant, or NULL for all tenants. $3: the parameter `beyond_tenant` of `find_listed`.
LISTED = f"""
-- jobs_listed
SELECT {COLUMNS} FROM job j LEFT JOIN run r ON r.job_id = j.id
WHERE j.id = ANY($1::uuid[]) AND ($2::text IS NULL OR j.tenant_id = $2) AND {LIVES} AND ($3 OR {OF_OWN_TENANT})
"""


async def find_listed(
    connection: Connection, tenant_id: str | None, job_ids: Sequence[UUID], *, beyond_tenant: bool
) -> Sequence[Row]:
    """The jobs `job_ids`, with the columns that lists show, in any order. Deleted jobs are left out. `beyond_tenant`:
    whether to include bulk operations that act on jobs of other tenants.
    """
    return await connection.fetch(LISTED, list(job_ids), tenant_id, beyond_tenant)


# The first SELECT finds a job whose rows are deleted, by its tombstone. The second SELECT finds a job that is deleted
# or past its retention, and so hidden from `find_job`, but whose rows retention has not deleted yet.
TOMBSTONE = f"""
-- job_tombstone
SELECT t.pipeline, t.is_run, t.because, t.at FROM tombstone t
WHERE t.job_id = $1 AND ($2::text IS NULL OR t.tenant_id = $2)
UNION ALL
SELECT j.pipeline, EXISTS (SELECT 1 FROM run r WHERE r.job_id = j.id),
       CASE WHEN j.keep_seconds = 0 THEN 'deleted' ELSE 'expired' END, j.expires_at
FROM job j WHERE j.id = $1 AND ($2::text IS NULL OR j.tenant_id = $2) AND NOT {LIVES}
LIMIT 1
"""


async def find_tombstone(connection: Connection, tenant_id: str | None, job_id: UUID) -> Row | None:
    """What is left of a job that is deleted or past its retention: `pipeline`, `is_run`, `because`, `at`."""
    return await connection.fetchrow(TOMBSTONE, job_id, tenant_id)


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Which dead letters to read. `pipelines`: read the dead letters of these pipelines. `runs`: also read the dead
    letters of runs, and of pipelines that are not in `owned`. `owned`: all pipelines that a kind of work has declared
    (leasehold/kinds). `template`, `code`: read only dead letters of this template, or with this error code.
    `beyond_tenant`: also read the dead letters of bulk operations that act on jobs of other tenants.
    """

    runs: bool
    pipelines: Sequence[str]
    owned: Sequence[str]
    template: str | None = None
    code: str | None = None
    beyond_tenant: bool = False


# $1: the tenant. $2 and $3: the time and the id of the last dead letter of the previous page. $4: the template. $5: the
# code. $6 to $8: the filter's fields `runs`, `pipelines` and `owned`. $9: only steps that failed after this time. $10:
# how many failed steps to search at most. $11: the filter's field `beyond_tenant`. `walked`: the number of the step in
# this search. If there are more than $10 failed steps, the last row is the step with the number $10 + 1. It only shows
# where the search ended, so no filter is applied to it. `fingerprint`: dead letters of one template, step and code have
# the same fingerprint if their messages differ only in numbers and ids. `contained`: a workflow started the task. A
# failed task of this kind is no dead letter, because the workflow decides what follows.
DEAD_LETTERS = f"""
-- dead_letters
SELECT t.id AS task_id, t.job_id, j.pipeline, r.job_id IS NOT NULL AS is_run, coalesce(r.template, j.pipeline) AS
       template, coalesce(r.version, j.pipeline_version) AS version, t.step, t.queue, t.attempt, t.finished_at AS at,
       f.code, f.message, f.cause, f.retryable,
       substr(encode(sha256(convert_to(
           concat_ws(' ', coalesce(r.template, j.pipeline), t.step, f.code,
                     regexp_replace(f.message, '[0-9a-f-]{{8,}}|[0-9]+', '#', 'g')),
           'UTF8')), 'hex'), 1, 16) AS fingerprint, t.walked
FROM (
    SELECT *, row_number() OVER (ORDER BY finished_at DESC, id DESC) AS walked FROM task
    WHERE tenant_id = $1 AND status = 'failed' AND NOT contained
      AND finished_at > coalesce($9::timestamptz, '-infinity')
      AND ($2::timestamptz IS NULL OR (finished_at, id) < ($2, $3::uuid))
    ORDER BY finished_at DESC, id DESC LIMIT $10 + 1
) AS t
JOIN job j ON j.id = t.job_id
LEFT JOIN run r ON r.job_id = t.job_id
LEFT JOIN LATERAL (SELECT * FROM failure f WHERE f.task_id = t.id ORDER BY f.epoch DESC LIMIT 1) AS f ON true
WHERE t.walked > $10 OR {LIVES} AND f.task_id IS NOT NULL
  AND ($4::text IS NULL OR coalesce(r.template, j.pipeline) = $4) AND ($5::text IS NULL OR f.code = $5)
  AND CASE WHEN r.job_id IS NOT NULL OR NOT (j.pipeline = ANY($8::text[])) THEN $6
           ELSE j.pipeline = ANY($7::text[]) END
  AND ($11 OR {OF_OWN_TENANT})
"""
#: The columns of DEAD_LETTERS that callers get: all except `walked`, which only the search uses.
_LETTER = (
    "task_id, job_id, pipeline, is_run, template, version, step, queue, attempt, at, code, message, cause, retryable,"
    " fingerprint"
)


async def dead_letters(
    connection: Connection,
    tenant_id: str,
    letter_filter: DeadLetterFilter,
    *,
    before: tuple[datetime, UUID] | None = None,
    since: datetime | None = None,
    fingerprint: str | None = None,
    limit: int,
) -> Sequence[Row]:
    """Steps that failed for good, the latest first. `before`: the time and the id of the last step of the previous
    page. `since`: only steps that failed later than this. `fingerprint`: only steps of the group to which
    `dead_letter_groups` gives this fingerprint. Only the latest MAX_SEARCHED failed steps are searched.
    """
    rows, _ = await dead_letters_page(
        connection, tenant_id, letter_filter, before=before, since=since, fingerprint=fingerprint, limit=limit
    )
    return rows


async def dead_letters_page(
    connection: Connection,
    tenant_id: str,
    letter_filter: DeadLetterFilter,
    *,
    before: tuple[datetime, UUID] | None,
    since: datetime | None = None,
    fingerprint: str | None = None,
    limit: int,
) -> tuple[Sequence[Row], tuple[datetime, UUID] | None]:
    """Do the same as `dead_letters`, and also return the `before` of the next page, or None if this is the last page. A
    page may have fewer letters than `limit` although another page follows. This happens if its search ended after
    MAX_SEARCHED failed steps.
    """
    max_searched = MAX_SEARCHED
    async with in_index_order(connection):
        rows = await connection.fetch(
            f"SELECT {_LETTER}, walked FROM ({DEAD_LETTERS}) AS d"
            " WHERE $12::text IS NULL OR fingerprint = $12 OR walked > $10 ORDER BY at DESC, task_id DESC LIMIT $13",
            *_parameters(tenant_id, letter_filter, before, since, max_searched),
            fingerprint,
            limit + 1,
        )
    letters = [row for row in rows if row["walked"] <= max_searched]
    if len(letters) > limit:
        return letters[:limit], (letters[limit - 1]["at"], letters[limit - 1]["task_id"])
    search_end = next((row for row in rows if row["walked"] > max_searched), None)
    if search_end is None:
        return letters, None
    # No filter was applied to this step, so the next page must begin with it. A page has only steps whose time and id
    # are less than those of `before`. So make the id greater by one.
    return letters, (search_end["at"], UUID(int=search_end["task_id"].int + 1))


def _parameters(
    tenant_id: str,
    letter_filter: DeadLetterFilter,
    before: tuple[datetime, UUID] | None,
    since: datetime | None,
    max_searched: int,
) -> tuple[object, ...]:
    # $1 to $11 of DEAD_LETTERS
    at, task_id = before or (None, None)
    return (
        tenant_id, at, task_id, letter_filter.template, letter_filter.code, letter_filter.runs,
        list(letter_filter.pipelines), list(letter_filter.owned), since, max_searched, letter_filter.beyond_tenant,
    )  # fmt: skip


async def dead_letter_groups(
    connection: Connection, tenant_id: str, letter_filter: DeadLetterFilter, limit: int, of_last: int = MAX_GROUPED
) -> Sequence[Row]:
    """Groups of the latest `of_last` dead letters, at most `limit`, the largest first. The dead letters of a group have
    the same template, step, code and message. Messages that differ only in numbers and ids count as the same. Only the
    latest _MAX_SEARCHED_BY_GROUPS failed steps are searched.
    """
    return await connection.fetch(
        "SELECT fingerprint, pipeline, is_run, template, step, code, count(*) AS n, min(at) AS first_at,"
        " max(at) AS last_at, (array_agg(message ORDER BY at DESC))[1] AS message"
        f" FROM ({DEAD_LETTERS} ORDER BY t.finished_at DESC LIMIT $13) AS d WHERE walked <= $10"
        " GROUP BY fingerprint, pipeline, is_run, template, step, code ORDER BY n DESC, fingerprint LIMIT $12",
        *_parameters(tenant_id, letter_filter, None, None, _MAX_SEARCHED_BY_GROUPS),
        limit,
        of_last,
    )


async def job_of_dead_letter(connection: Connection, tenant_id: str | None, task_id: UUID) -> UUID | None:
    """The job of the dead letter `task_id`. None: the task does not exist, has not failed, or is `contained`."""
    job_id: UUID | None = await connection.fetchval(
        "SELECT t.job_id FROM task t WHERE t.id = $1 AND ($2::text IS NULL OR t.tenant_id = $2)"
        " AND t.status = 'failed' AND NOT t.contained",
        task_id,
        tenant_id,
    )
    return job_id


# The tasks of the job $1 of the tenant $2, at most $3. `item` has a row for each task that another task has started: a
# part of a fan-out, or a step of a workflow.
_LINKS = """
-- step_links
SELECT t.id, t.step, t.status, t.unblocks, t.contained, i.parent_id
FROM task t LEFT JOIN item i ON i.task_id = t.id
WHERE t.job_id = $1 AND t.tenant_id = $2 ORDER BY t.position, i.number NULLS FIRST, t.step LIMIT $3
"""


async def step_links(connection: Connection, tenant_id: str, job_id: UUID) -> Sequence[Row]:
    """The job's tasks, at most MAX_STEPS, with the links between them. `unblocks`: the tasks that need this task.
    `parent_id`: the task that fanned out into this task; if this task is `contained`, the workflow that started it.
    """
    return await connection.fetch(_LINKS, job_id, tenant_id, MAX_STEPS)


async def ledger(connection: Connection, tenant_id: str, job_id: UUID, at_most: int = MAX_LEDGER) -> Sequence[Row]:
    """The latest `at_most` events of a job's tasks, in order, for example claims and the ends of attempts. The event of
    a completed task also has the outputs of the task.
    """
    return await connection.fetch(
        "SELECT e.seq, e.at, e.kind, e.step, e.epoch, e.task_status, e.data,"
        " CASE WHEN e.kind = 'completed' THEN (SELECT jsonb_agg(jsonb_build_object('key', o.key, 'sha256', o.sha256,"
        "  'size', o.size)) FROM output o WHERE o.task_id = e.task_id) END AS outputs"
        " FROM (SELECT * FROM history WHERE job_id = $1 AND tenant_id = $2 AND task_id IS NOT NULL"
        " ORDER BY seq DESC LIMIT $3) AS e ORDER BY e.seq",
        job_id,
        tenant_id,
        at_most,
    )


# The facts about each unfinished step of a job. $1: the job. $2: the tenant. $3: how many steps to read at most. To
# find the place of a waiting step in its queue, PostgreSQL reads the tasks ahead of the step. All waiting steps of the
# job together cause about $4 such reads: each step gets an equal part, but at least 10 reads. So a job with many
# waiting steps costs about as much as a job with one waiting step.
_WHY_WAITING = """
-- why_waiting
WITH unfinished AS (
    -- `missing`: the code that a worker lacked, which put the task off. Until a worker has this code, `available_at` is
    -- not the time of the task's start.
    SELECT t.*, (SELECT u.handler FROM unknown_task u
                 WHERE u.task_id = t.id AND u.epoch = t.epoch AND t.status = 'waiting') AS missing
    FROM task t
    WHERE t.job_id = $1 AND t.tenant_id = $2 AND t.finished_at IS NULL AND t.status <> 'blocked'
    ORDER BY t.position, t.step LIMIT $3
), share AS (
    SELECT greatest(10, $4 / greatest(count(*), 1))::int AS max_reads FROM unfinished WHERE status <> 'running'
)
SELECT t.step, t.status, t.queue, nullif(t.available_at, 'infinity') AS available_at,
       t.available_at > clock_timestamp() AND t.missing IS NULL AS later, t.waiting_on,
       (SELECT array_agg(DISTINCT e.name ORDER BY e.name) FROM journal e WHERE e.job_id = t.job_id
          AND NOT t.contained AND e.kind = 'signal' AND e.state = 'open') AS signals,
       t.lease_until, t.lease_owner, t.lease_until < clock_timestamp() AS lapsed,
       (SELECT p.reason FROM paused_queue p WHERE p.queue = t.queue) AS paused_because,
       coalesce(t.missing, t.handler, (SELECT j.pipeline || '.' || t.step FROM job j WHERE j.id = t.job_id)) AS handler,
       CASE WHEN t.status <> 'running' AND t.available_at <= clock_timestamp() THEN
         (SELECT count(*) FROM (SELECT 1 FROM task earlier
            WHERE earlier.queue = t.queue AND earlier.priority <= t.priority
              AND earlier.status IN ('pending', 'retry', 'waiting') AND earlier.available_at < t.available_at
            LIMIT (SELECT max_reads FROM share)) AS counted) ELSE 0 END AS ahead,
       (SELECT max_reads FROM share) AS ahead_bound,
       (SELECT jsonb_build_object('code', f.code, 'message', f.message) FROM failure f WHERE f.task_id = t.id
          ORDER BY f.epoch DESC LIMIT 1) AS failure
FROM unfinished t ORDER BY t.position, t.step
"""


async def why_waiting(
    connection: Connection, tenant_id: str, job_id: UUID, at_most: int = MAX_STEPS, max_ahead: int = MAX_COUNTED
) -> Sequence[Row]:
    """The facts that decide whether a worker can claim a step, for at most `at_most` unfinished steps that are not
    blocked. `handler`: the `pipeline.step` of the code that does the step. `later`: the step is not due yet. `lapsed`:
    the step's lease has expired. `signals`: the names of the signals for which the workflow waits. `ahead`: the number
    of tasks in the step's queue that are at least as urgent as the step, and have been due for longer. If `ahead`
    equals the row's `ahead_bound`, there may be more such tasks. The parameter `max_ahead`: all steps together count
    about this many tasks.
    """
    return await connection.fetch(_WHY_WAITING, job_id, tenant_id, at_most, max_ahead)


# The concurrency limits (table `gate`) at which the job $1 of the tenant $2 waits. The table `gate_job` has a row for
# each job and each of its limits: the job waits at the limit while `admitted_at` is NULL. A limit may have admitted a
# million jobs, and a million jobs may wait at it. So PostgreSQL reads at most $4 admitted jobs of a limit, and at most
# $3 of the jobs that wait there ahead of this job. `owner`: the tenant of a waiting job. `ready_at`: the instant before
# which no limit admits the job.
_WHY_HELD = f"""
-- why_held
SELECT g.key, g.at_most, g.per_minute, admitted.inside, admitted.lately, admitted.counted = $4 AS cut,
       CASE WHEN held.ready_at > clock_timestamp() THEN held.ready_at END AS starts_at,
       (SELECT count(*) FILTER (WHERE counted.ready_at <= clock_timestamp()) FROM (
          SELECT earlier.ready_at FROM gate_job earlier
          WHERE earlier.tenant_id = g.tenant_id AND earlier.key = g.key AND earlier.admitted_at IS NULL
            AND earlier.owner = held.owner
            AND (earlier.priority, earlier.ready_at, earlier.job_id) < (held.priority, held.ready_at, held.job_id)
          LIMIT $3) AS counted) AS ahead
FROM gate_job held JOIN gate g ON g.tenant_id = held.tenant_id AND g.key = held.key JOIN job j ON j.id = held.job_id
CROSS JOIN LATERAL (
    SELECT count(*) AS counted, count(*) FILTER (WHERE admitted_job.finished_at IS NULL) AS inside,
           count(*) FILTER (WHERE {within_minute("admission.admitted_at")}) AS lately
    FROM (SELECT job_id, admitted_at FROM gate_job
          WHERE tenant_id = g.tenant_id AND key = g.key AND admitted_at IS NOT NULL LIMIT $4) AS admission
    JOIN job admitted_job ON admitted_job.id = admission.job_id) AS admitted
WHERE held.job_id = $1 AND j.tenant_id = $2 AND held.admitted_at IS NULL ORDER BY g.key
"""


async def why_held(
    connection: Connection,
    tenant_id: str,
    job_id: UUID,
    max_ahead: int = MAX_COUNTED,
    most_admitted: int = MAX_COUNTED,
) -> Sequence[Row]:
    """The concurrency limits at which a job waits. `inside`: admitted jobs that are unfinished. `lately`: jobs admitted
    in the last minute. PostgreSQL reads at most `most_admitted` jobs of a limit for these two counts. `cut`: the limit
    has at least that many admitted jobs, so the two counts mean "at least". `ahead`: waiting jobs of the same tenant
    that come before this job in the order of admission, and whose start time has come. PostgreSQL reads at most
    `max_ahead` waiting jobs. `starts_at`: the start time of this job, before which no limit admits it; None: this time
    has come.
    """
    return await connection.fetch(_WHY_HELD, job_id, tenant_id, max_ahead, most_admitted)
