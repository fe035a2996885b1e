"""Reads what only a person can settle, for /v1/unsettled: orders of unknown outcome, workflows that wait for a signal,
silent external steps, disabled webhooks and paused schedules. An order is what a step requested from another system,
for example from a provider. A step is silent if no external worker has worked on it for some time.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from leasehold.db.database import Connection
from leasehold.db.job_reads import Row

#: For one page, at most this many of a tenant's jobs of each sort are searched. The sorts are: the jobs of one pipeline
#: that have an error, the cancelled jobs, and the unfinished jobs.
MAX_SEARCHED = 10_000

#: SQL condition, to be formatted: the job `j` has ended without success, and nobody knows whether its step `t` has
#: ordered something. The step's note `n` (what its attempts store for later attempts) has the member `{intent}`, with
#: which the step records that it is about to order. `{now}`: the current time. A step that a workflow started
#: (`contained`) is left out, because the workflow decides what follows the failure of the step.
IS_UNKNOWN = """j.status IN ('failed', 'expired', 'cancelled') AND t.status IN ('failed', 'cancelled', 'skipped')
      AND NOT t.contained AND n.value ? {intent}
      AND (j.expires_at IS NULL OR j.expires_at > {now})"""

# SQL, to be formatted: the rows of `searched_job`. For each pipeline these are its newest `{most}` jobs with an error.
# For all pipelines together they are also the newest `{most_cancelled}` cancelled jobs (a cancelled job has no error).
# `search`: the pipeline, or NULL for the search of cancelled jobs. `{more}`: a further condition. $1: the tenant. $3:
# the pipelines.
_SEARCHED_JOBS = """SELECT failed_job.id, failed_job.pipeline, failed_job.pipeline AS search
    FROM (SELECT DISTINCT name FROM unnest($3::text[]) AS pipelines(name)) AS searched_pipeline
    CROSS JOIN LATERAL (
        SELECT j.id, j.pipeline FROM job j
        WHERE j.tenant_id = $1 AND {more} AND j.error IS NOT NULL AND j.pipeline = searched_pipeline.name
        ORDER BY j.id DESC LIMIT {most}) AS failed_job
    UNION ALL
    SELECT cancelled_job.id, cancelled_job.pipeline, NULL FROM (
        SELECT j.id, j.pipeline FROM job j
        WHERE j.tenant_id = $1 AND {more} AND j.cancel IS NOT NULL AND j.error IS NULL
        ORDER BY j.id DESC LIMIT {most_cancelled}) AS cancelled_job"""

# SQL: the jobs among `searched_job` whose order a person must settle, each with its task and note. The table
# `settlement` has the orders that a person has settled already. `ordering` has a row for each step that orders: its
# pipeline (from $3), its name (from $4), and the member of its note that IS_UNKNOWN calls `{intent}` (from $5).
_UNKNOWN_ORDERS = f"""searched_job
    JOIN unnest($3::text[], $4::text[], $5::text[]) AS ordering(pipeline, step, intent)
      ON ordering.pipeline = searched_job.pipeline
    JOIN job j ON j.id = searched_job.id
    JOIN task t ON t.job_id = j.id AND t.step = ordering.step
    JOIN note n ON n.task_id = t.id
    WHERE {IS_UNKNOWN.format(intent="ordering.intent", now="statement_timestamp()")}
      AND NOT EXISTS (SELECT 1 FROM settlement x WHERE x.task_id = t.id AND x.epoch = t.epoch)"""

# Jobs whose order a person must settle. $1: the tenant. $2: the last job of the previous page. $3 to $5: the steps that
# order, as in _UNKNOWN_ORDERS. At most $6 rows are returned. Each search of `searched_job` reads at most $7 jobs. If a
# search finds this many, it has ended early, at the oldest job that it found. `search_end`: the newest job at which a
# search ended early. This page has no job that is older than `search_end`, because such jobs are on a later page.
_ORDERS = f"""
-- unsettled_orders
WITH searched_job AS MATERIALIZED (
    {_SEARCHED_JOBS.format(more="($2::uuid IS NULL OR j.id < $2)", most="$7", most_cancelled="$7")}
), search_end AS (
    SELECT (SELECT id FROM (SELECT id, row_number() OVER (PARTITION BY search ORDER BY id DESC) AS nth
                            FROM searched_job) AS numbered
            WHERE nth = $7 ORDER BY id DESC LIMIT 1) AS id
)
SELECT search_end.id AS searched_to, failed_order.* FROM search_end LEFT JOIN LATERAL (
    SELECT j.id AS job_id, j.tenant_id, j.pipeline, j.params, j.error, j.finished_at AS since, n.value AS note
    FROM {_UNKNOWN_ORDERS}
      AND (search_end.id IS NULL OR j.id >= search_end.id)
    ORDER BY j.id DESC LIMIT $6) AS failed_order ON true
ORDER BY failed_order.job_id DESC
"""

# How many orders a person must settle. $1: the tenant. $2: error codes. $3 to $5: the steps that order, as in
# _UNKNOWN_ORDERS. The statement makes the searches of _SEARCHED_JOBS, and one more search for each error code, over all
# pipelines. Each search reads at most $6 jobs. But the search of cancelled jobs reads ten times as many, because most
# cancelled jobs may be of pipelines that order nothing. Such jobs cost little.
_COUNT = f"""
-- unsettled_orders_count
WITH searched_job AS MATERIALIZED (
    {_SEARCHED_JOBS.format(more="true", most="$6", most_cancelled="10 * $6")}
    UNION ALL
    SELECT job_of_code.id, job_of_code.pipeline, 'code ' || searched_code.name
    FROM unnest($2::text[]) AS searched_code(name)
    CROSS JOIN LATERAL (
        SELECT j.id, j.pipeline FROM job j
        WHERE j.tenant_id = $1 AND j.error IS NOT NULL AND j.error ->> 'code' = searched_code.name
        ORDER BY j.id DESC LIMIT $6) AS job_of_code
)
SELECT (SELECT count(DISTINCT t.id)::int FROM {_UNKNOWN_ORDERS}) AS n,
       EXISTS (SELECT FROM searched_job GROUP BY search
               HAVING count(*) >= CASE WHEN search IS NULL THEN 10 * $6 ELSE $6 END) AS has_more
"""

#: SQL condition, to be formatted: the task `t` is an external step on which nobody has worked for `{seconds}` seconds.
SILENT = """starts_with(t.queue, 'ext:')
  AND CASE WHEN t.status = 'running' THEN t.lease_until
           WHEN t.status IN ('pending', 'retry', 'waiting') THEN t.available_at END
      < statement_timestamp() - make_interval(secs => {seconds})"""

# Silent external steps. These are due steps that no external worker has claimed for $3 seconds, and steps whose lease
# expired more than $3 seconds ago (no heartbeat renewed it). $1: the tenant. $2: the last task of the previous page or,
# if that page's search ended early, the last job of the search. (If the task $2 was deleted meanwhile, its id counts as
# a job's id. This works, because the ids of tasks and of jobs sort by time.) At most $4 rows are returned, and at most
# $5 jobs are searched. `page_before`: the task $2, unless it was deleted, or is a job. `page_start`: this page has no
# job that is newer than this job. `search_end`: the job at which the search ended early. The queue of external workers
# is stored as `ext:TENANT:QUEUE`.
SILENT_STEPS = f"""
-- unsettled_external
WITH page_before AS (SELECT job_id, position, id FROM task WHERE id = $2 AND tenant_id = $1
), page_start AS (
    SELECT coalesce((SELECT job_id FROM page_before), $2::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff') AS job_id
), searched_job AS MATERIALIZED (
    SELECT j.id FROM job j WHERE j.tenant_id = $1 AND j.finished_at IS NULL AND j.external > 0
      AND j.id <= (SELECT job_id FROM page_start)
      AND j.id IS DISTINCT FROM CASE WHEN NOT EXISTS (SELECT 1 FROM page_before) THEN $2::uuid END
    ORDER BY j.id DESC LIMIT $5
), search_end AS (
    SELECT (SELECT id FROM searched_job ORDER BY id DESC OFFSET $5 - 1 LIMIT 1) AS id
)
SELECT search_end.id AS searched_to, silent_step.* FROM search_end LEFT JOIN LATERAL (
    SELECT t.id AS task_id, t.job_id, t.tenant_id, t.step, t.position,
           substr(t.queue, length('ext:' || t.tenant_id || ':') + 1) AS queue,
           CASE WHEN t.status = 'running' THEN t.lease_until ELSE t.available_at END AS since, t.losses, t.attempt
    FROM searched_job JOIN task t ON t.job_id = searched_job.id
    WHERE {SILENT.format(seconds="$3")}
      AND ($2::uuid IS NULL OR t.job_id < (SELECT job_id FROM page_start)
           OR (t.position, t.id) > (SELECT position, id FROM page_before))
    ORDER BY t.job_id DESC, t.position, t.id LIMIT $4) AS silent_step ON true
ORDER BY silent_step.job_id DESC, silent_step.position, silent_step.task_id
"""

# Runs whose workflow waits for a signal. This means that its journal (a row for each call of the workflow) has an open
# wait. $1: the tenant. $2: the last run of the previous page. At most $3 rows are returned, and at most $4 jobs are
# searched. `search_end`: the job at which the search ended early.
_WAITING = """
-- unsettled_approvals
WITH searched_job AS MATERIALIZED (
    SELECT j.id, j.pipeline FROM job j WHERE j.tenant_id = $1 AND j.finished_at IS NULL
      AND ($2::uuid IS NULL OR j.id < $2) ORDER BY j.id DESC LIMIT $4
), search_end AS (
    SELECT (SELECT id FROM searched_job ORDER BY id DESC OFFSET $4 - 1 LIMIT 1) AS id
)
SELECT search_end.id AS searched_to, waiting_run.* FROM search_end LEFT JOIN LATERAL (
    SELECT searched_job.id AS job_id, $1::text AS tenant_id, searched_job.pipeline, wait.signals, wait.since, wait.until
    FROM searched_job CROSS JOIN LATERAL (
        SELECT array_agg(DISTINCT e.name ORDER BY e.name) AS signals, min(e.at) AS since, min(e.due_at) AS until
        FROM journal e WHERE e.job_id = searched_job.id AND e.kind = 'signal' AND e.state = 'open'
        HAVING count(*) > 0) AS wait
    ORDER BY searched_job.id DESC LIMIT $3) AS waiting_run ON true
ORDER BY waiting_run.job_id DESC
"""

# Schedules that the platform has paused, and (below) webhooks that it has disabled. $1: the tenant. $2: the last row of
# the previous page; NULL: this is the first page. At most $3 rows are returned.
_SCHEDULES = """
-- unsettled_schedules
SELECT id AS schedule_id, tenant_id, template, paused_because, updated_at FROM schedule
WHERE tenant_id = $1 AND NOT enabled AND paused_because IS NOT NULL AND ($2::uuid IS NULL OR id < $2)
ORDER BY id DESC LIMIT $3
"""

_WEBHOOKS = """
-- unsettled_webhooks
-- An earlier release wrote no `disabled_at`.
SELECT id AS webhook_id, tenant_id, url, disabled_because, coalesce(disabled_at, created_at) AS since FROM webhook
WHERE tenant_id = $1 AND NOT enabled AND disabled_because IS NOT NULL AND ($2::uuid IS NULL OR id < $2)
ORDER BY id DESC LIMIT $3
"""


async def orders(
    connection: Connection,
    tenant_id: str,
    ordering: Sequence[tuple[str, str, str]],
    before: UUID | None,
    limit: int,
    max_searched: int = MAX_SEARCHED,
) -> tuple[Sequence[Row], UUID | None]:
    """Ended jobs whose order has an unknown outcome, newest first. `ordering`: the steps that order, each by its
    pipeline, its name and the member of its note that records the order. There must be at least one step. A page
    searches at most `max_searched` jobs with an error in each pipeline, and at most `max_searched` cancelled jobs. The
    second value is the last job that the page covers. Pass it as `before` to get the next page. None: this is the last
    page.
    """
    pipelines, steps, intents = zip(*ordering, strict=True)
    rows = await connection.fetch(
        _ORDERS, tenant_id, before, list(pipelines), list(steps), list(intents), limit + 1, max_searched
    )
    return _page_of(rows, limit, "job_id")


async def count_orders(
    connection: Connection,
    tenant_id: str,
    ordering: Sequence[tuple[str, str, str]],
    codes: Sequence[str],
    max_searched: int,
) -> tuple[int, bool]:
    """The number of ended jobs whose order has an unknown outcome, and whether there may be more in older jobs.
    `ordering`: as for `orders`. For each pipeline, and for each of the `codes`, the count searches the newest
    `max_searched` jobs with an error. It also searches ten times as many cancelled jobs. These searches are separate,
    so many new jobs of one sort hide no order of another sort.
    """
    pipelines, steps, intents = zip(*ordering, strict=True)
    row = await connection.fetchrow(
        _COUNT, tenant_id, list(codes), list(pipelines), list(steps), list(intents), max_searched
    )
    assert row is not None
    return row["n"], row["has_more"]


def _page_of(rows: Sequence[Row], limit: int, id_column: str) -> tuple[Sequence[Row], UUID | None]:
    """The page of the fetched rows (at most `limit` + 1), and the id at which the next page continues. This id is that
    of the page's last row, or of the job at which the search ended early (`searched_to`). None: this is the last page.
    If a statement finds nothing, it returns one row, with nulls in all columns except `searched_to`.
    """
    found_rows = [row for row in rows if row[id_column] is not None]
    if len(found_rows) > limit:
        return found_rows[:limit], found_rows[limit - 1][id_column]
    return found_rows, rows[0]["searched_to"]


async def silent_steps(
    connection: Connection,
    tenant_id: str,
    seconds: float,
    after: UUID | None,
    limit: int,
    max_searched: int = MAX_SEARCHED,
) -> tuple[Sequence[Row], UUID | None]:
    """External steps on which nobody has worked for `seconds`, the newest jobs' steps first. A page searches at most
    `max_searched` unfinished jobs. Pass the second value as `after` to get the next page. None: this is the last page.
    """
    rows = await connection.fetch(SILENT_STEPS, tenant_id, after, seconds, limit + 1, max_searched)
    return _page_of(rows, limit, "task_id")


async def disabled_webhooks(connection: Connection, tenant_id: str, before: UUID | None, limit: int) -> Sequence[Row]:
    """Webhooks that the platform has disabled, newest first."""
    return await connection.fetch(_WEBHOOKS, tenant_id, before, limit)


async def waiting_runs(
    connection: Connection, tenant_id: str, before: UUID | None, limit: int, max_searched: int = MAX_SEARCHED
) -> tuple[Sequence[Row], UUID | None]:
    """Runs whose workflow waits for signals now, newest first. `signals`: the names of the signals. `since`: when the
    first wait began. `until`: the earliest time at which a wait ends by itself. A page searches at most `max_searched`
    unfinished jobs. The second value is as in `orders`.
    """
    return _page_of(await connection.fetch(_WAITING, tenant_id, before, limit + 1, max_searched), limit, "job_id")


async def paused_schedules(connection: Connection, tenant_id: str, before: UUID | None, limit: int) -> Sequence[Row]:
    """Schedules that the platform has paused, newest first."""
    return await connection.fetch(_SCHEDULES, tenant_id, before, limit)
