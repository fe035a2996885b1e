"""Reads runs, queues and workers, for the runs API and the console. Each read is one statement. job_reads.py reads jobs
of every kind. A run is a job with a row in the table `run`.

Every query names the tenant. Exception: `queues`, `count_runnable`, `depth` and `workers` read all tenants, for
operators and for the platform itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from uuid import UUID

from leasehold.db.database import Connection
from leasehold.db.job_reads import LIVES, MAX_COUNTED, MAX_OUTPUTS, MAX_STEPS, Row

# The columns of a run in a list. Each statement that contains this text adds its conditions. LIVES leaves out jobs that
# are deleted or past their retention.
_RUN = f"""
SELECT r.job_id AS id, r.template, r.version, r.scope, r.scope_id, r.scheduled_at, r.schedule_id, r.tick, r.rerun_of,
       j.status, j.priority, j.error, j.cancel, j.created_at, j.started_at, j.finished_at, j.deadline_at, j.event_seq,
       j.held, j.dedupe_key,
       greatest(j.created_at, j.started_at, j.finished_at, (j.cancel ->> 'at')::timestamptz,
                (SELECT e.at FROM history e WHERE e.job_id = j.id ORDER BY e.seq DESC LIMIT 1)) AS updated_at,
       (j.cancel ->> 'at')::timestamptz AS cancel_requested_at
FROM run r JOIN job j ON j.id = r.job_id AND {LIVES}
"""

# $3: the task of the last step of the previous page, or NULL. The page has the next MAX_STEPS steps. There are two
# orders of steps. The order (contained, position, step) decides which steps the page has, and which of them is
# `last_step`. In this order, the steps that a workflow has started (`contained`) come last. The page then lists its
# steps by (position, step). The outputs are chosen and listed in the same way, by step and name. `all_steps` is NULL
# for a first page with fewer than MAX_STEPS steps, because such a page has all steps of the run. Otherwise `all_steps`
# describes all steps of the run: their number (`n`), their mean progress (`percent`), and the first step that has
# neither succeeded nor been skipped (`phase`).
FIND = f"""
-- run_find
SELECT listed.*, j.params AS payload,
    (SELECT jsonb_object_agg(g.name, g.value) FROM job_tag g WHERE g.job_id = listed.id) AS tags,
    page.steps, page.last_step,
    CASE WHEN $3::uuid IS NOT NULL OR page.n = {MAX_STEPS} THEN (
        SELECT jsonb_build_object('n', count(*),
            'percent', avg(CASE WHEN t.status IN ('succeeded', 'skipped') THEN 100 ELSE coalesce(p.percent, 0) END),
            'phase', (array_agg(t.step ORDER BY t.position, t.step)
                      FILTER (WHERE t.status NOT IN ('succeeded', 'skipped')))[1])
        FROM task t LEFT JOIN progress p ON p.task_id = t.id WHERE t.job_id = listed.id) END AS all_steps,
    (SELECT jsonb_agg(jsonb_build_object('step', o.step, 'name', o.name, 'key', o.key, 'size', o.size,
        'sha256', o.sha256, 'content_type', o.content_type) ORDER BY o.step, o.name)
     FROM (SELECT x.*, (SELECT t.contained FROM task t WHERE t.id = x.task_id) AS contained FROM output x
           WHERE x.job_id = listed.id ORDER BY contained, x.step, x.name LIMIT {MAX_OUTPUTS}) AS o) AS outputs
FROM ({_RUN} WHERE r.job_id = $1 AND r.tenant_id = $2) AS listed JOIN job j ON j.id = listed.id
CROSS JOIN LATERAL (
    SELECT count(*) AS n, (array_agg(t.id ORDER BY t.contained DESC, t.position DESC, t.step DESC))[1] AS last_step,
        jsonb_agg(jsonb_build_object(
        'id', t.step, 'status', t.status, 'attempt', t.attempt, 'max_attempts', t.max_attempts, 'task_id', t.id,
        'epoch', t.epoch, 'queue', t.queue, 'started_at', t.started_at, 'finished_at', t.finished_at,
        'available_at', nullif(t.available_at, 'infinity'), 'percent', p.percent, 'summary', p.summary,
        'result', (SELECT x.value FROM result x WHERE x.task_id = t.id),
        'error', (SELECT jsonb_build_object('code', f.code, 'message', f.message, 'retryable', f.retryable)
                  FROM failure f WHERE f.task_id = t.id ORDER BY f.epoch DESC LIMIT 1)
        ) ORDER BY t.position, t.step) AS steps
    FROM (SELECT * FROM task WHERE job_id = listed.id AND ($3::uuid IS NULL OR (contained, position, step) > (
              SELECT c.contained, c.position, c.step FROM task c WHERE c.id = $3 AND c.job_id = listed.id))
          ORDER BY contained, position, step LIMIT {MAX_STEPS}) AS t
    LEFT JOIN progress p ON p.task_id = t.id) AS page
"""


# A run alone, without its steps and outputs.
HEAD = f"""
-- run_head
{_RUN} WHERE r.job_id = $1 AND r.tenant_id = $2
"""


async def find_listed_run(connection: Connection, tenant_id: str, run_id: UUID) -> Row | None:
    """The run with the columns of `list_runs`, without steps and outputs. None: the tenant has no such run."""
    return await connection.fetchrow(HEAD, run_id, tenant_id)


async def find_run(connection: Connection, tenant_id: str, run_id: UUID, after_step: UUID | None = None) -> Row | None:
    """The run with its steps, at most MAX_STEPS, and its outputs, at most MAX_OUTPUTS. `after_step`: the task of the
    last step of the previous page; None: the page begins with the run's first step. Returns None if the tenant has no
    such run.
    """
    return await connection.fetchrow(FIND, run_id, tenant_id, after_step)


#: Status -> a condition that every job with this status meets. With this condition in the statement, PostgreSQL can use
#: the small partial index of the status. The status `succeeded` has no partial index, so it needs no condition.
_CONDITION_OF_STATUS = {
    "failed": "AND j.error IS NOT NULL",
    "expired": "AND j.error IS NOT NULL",
    "cancelled": "AND j.cancel IS NOT NULL",
    "cancel_requested": "AND j.cancel IS NOT NULL AND j.finished_at IS NULL",
    "succeeded": "",
}
#: The condition of every other status. Jobs with such a status are unfinished.
_CONDITION_OF_UNFINISHED = "AND j.finished_at IS NULL"


def list_statement(*, template: bool, scope: bool, status: str | None) -> str:
    """The statement of one page of runs, newest first. `template` and `scope`: whether the page has only the runs of
    one template, or of one scope. `status`: the page has only runs with this status; None: with any status.

    Parameters: $1 tenant; $2 the last run of the previous page, or NULL; $3 limit. Then the values of the filters:
    template, scope and scope_id, status.
    """
    conditions, next_parameter = ["r.tenant_id = $1", "($2::uuid IS NULL OR r.job_id < $2)"], 4
    for column, is_used in (("r.template", template), ("r.scope", scope), ("r.scope_id", scope)):
        if is_used:
            conditions.append(f"{column} = ${next_parameter}")
            next_parameter += 1
    status_condition = ""
    if status is not None:  # repeat the conditions on columns of `j`, because only they can use an index of `job`
        status_condition = (
            f"AND j.tenant_id = $1 AND ($2::uuid IS NULL OR j.id < $2) AND j.status = ${next_parameter}"
            f" {_CONDITION_OF_STATUS.get(status, _CONDITION_OF_UNFINISHED)}"
        )
    order = "j.id" if status_condition else "r.job_id"
    return f"{_RUN} WHERE {' AND '.join(conditions)} {status_condition} ORDER BY {order} DESC LIMIT $3"


async def list_runs(
    connection: Connection,
    tenant_id: str,
    *,
    template: str | None,
    scope: tuple[str, str] | None,
    status: str | None,
    before: UUID | None,
    limit: int,
) -> Sequence[Row]:
    """At most `limit` of the tenant's runs, newest first. `before`: list only runs that are older than this run.
    `scope`: the kind and the id of a scope.
    """
    statement = list_statement(template=template is not None, scope=scope is not None, status=status)
    filters = [value for value in (template, *(scope or ()), status) if value is not None]
    return await connection.fetch(statement, tenant_id, before, limit, *filters)


# $1: at most this many due tasks are counted in one queue. $2: about this many are counted at most in all queues of the
# page together. $3: a worker without a heartbeat for this many seconds is silent. (In most cases a silent worker has
# died, but its row still exists.) $4: the last queue of the previous page, or NULL. $5: the page has at most this many
# queues. `queue_with_tasks`: the queues with tasks that wait to run, now or later; the recursion jumps through an index
# from queue to queue. `served_queue`: the queues that workers serve, without draining and silent workers.
# `queue_starts`: by queue, how many attempts the workers started in their last minute. At most `share.max_tasks` due
# tasks are counted in each queue. This number follows from $1, $2 and the number of queues on the page. A queue of
# external workers is stored as `ext:<tenant>:<queue>`. There may be very many queues of external workers, so they come
# last.
_QUEUES = """
-- queues
WITH RECURSIVE queue_with_tasks(queue) AS (
    (SELECT t.queue FROM task t WHERE t.status IN ('pending', 'retry', 'waiting') ORDER BY t.queue LIMIT 1)
    UNION ALL
    SELECT next.queue FROM queue_with_tasks last CROSS JOIN LATERAL (
        SELECT t.queue FROM task t WHERE t.status IN ('pending', 'retry', 'waiting') AND t.queue > last.queue
        ORDER BY t.queue LIMIT 1) AS next
), served_queue AS (
    SELECT unnest(w.queues) AS queue, count(*) AS workers FROM worker w
    WHERE NOT w.draining AND w.seen_at > statement_timestamp() - make_interval(secs => $3) GROUP BY 1
), queue_starts AS (
    SELECT starts.key AS queue, sum(starts.value::bigint)::bigint AS n
    FROM worker w CROSS JOIN jsonb_each_text(w.starts_per_minute) AS starts
    WHERE w.seen_at > clock_timestamp() - interval '1 minute' GROUP BY 1
), all_queues AS (
    SELECT queue FROM queue_with_tasks UNION SELECT queue FROM served_queue UNION SELECT queue FROM paused_queue
), page AS (
    SELECT queue FROM all_queues
    WHERE $4::text IS NULL OR (starts_with(queue, 'ext:'), queue) > (starts_with($4, 'ext:'), $4)
    ORDER BY starts_with(queue, 'ext:'), queue LIMIT $5
)
SELECT q.queue, coalesce(served_queue.workers, 0) AS workers, p.reason AS paused_because, due_tasks.n AS runnable,
       due_tasks.oldest, due_tasks.n = share.max_tasks AS has_more,
       CASE WHEN NOT starts_with(q.queue, 'ext:') THEN coalesce(queue_starts.n, 0) END AS starts_per_minute
FROM page q
CROSS JOIN (SELECT least($1, greatest(20, $2 / greatest(count(*), 1))) AS max_tasks FROM page) AS share
LEFT JOIN served_queue ON served_queue.queue = q.queue
LEFT JOIN queue_starts ON queue_starts.queue = q.queue
LEFT JOIN paused_queue p ON p.queue = q.queue
CROSS JOIN LATERAL (
    SELECT count(*) AS n, min(available_at) AS oldest FROM (
        SELECT t.available_at FROM task t
        WHERE t.queue = q.queue AND t.status IN ('pending', 'retry', 'waiting')
          AND t.available_at <= statement_timestamp() LIMIT share.max_tasks) AS counted
) AS due_tasks
ORDER BY starts_with(q.queue, 'ext:'), q.queue
"""


#: `queues` counts about this many tasks in all queues of a page together. The more queues the page has, the lower is
#: the bound of each queue, but it is never below 20.
_MAX_IN_ALL_QUEUES = 200_000
#: A page has at most this many queues, or workers.
MAX_LISTED = 1000


async def queues(
    connection: Connection,
    silent_seconds: float,
    at_most: int = MAX_COUNTED,
    in_all: int = _MAX_IN_ALL_QUEUES,
    *,
    after: str | None = None,
    limit: int = MAX_LISTED,
) -> Sequence[Row]:
    """The queues of all tenants, by name. A queue is listed if it is paused, if tasks in it wait to run (now or later),
    or if workers serve it. The queues of external workers come last. `after`: the last queue of the previous page;
    None: this is the first page. `limit`: the page has at most this many queues.

    `workers`: how many workers serve the queue, are not draining, and have had a heartbeat within `silent_seconds`.
    `runnable`: due tasks, counted up to `at_most` in each queue and up to about `in_all` in all queues of the page
    together. `has_more`: the queue may have more due tasks than were counted. `oldest`: when the oldest counted task
    became due. `starts_per_minute`: the attempts that the registered workers started in the minute before they last
    renewed their rows; None for a queue of external workers, whose claims are not counted.
    """
    return await connection.fetch(_QUEUES, at_most, in_all, silent_seconds, after, limit)


# $1: queues. $2: for each of these queues, how many tasks are counted at most.
_RUNNABLE = """
-- queues_runnable
SELECT counted_queue.queue, (
    SELECT count(*) FROM (
        SELECT 1 FROM task t
        WHERE t.queue = counted_queue.queue AND t.status IN ('pending', 'retry', 'waiting')
          AND t.available_at <= statement_timestamp() LIMIT counted_queue.max_tasks) AS counted
)::int AS n
FROM unnest($1::text[], $2::int[]) AS counted_queue(queue, max_tasks)
WHERE NOT EXISTS (SELECT 1 FROM paused_queue p WHERE p.queue = counted_queue.queue)
"""


async def count_runnable(connection: Connection, at_most_by_queue: Mapping[str, int]) -> dict[str, int]:
    """The number of tasks that a worker could claim now, by queue. Each queue is counted up to its number in
    `at_most_by_queue`. Paused queues are absent.
    """
    rows = await connection.fetch(_RUNNABLE, list(at_most_by_queue), list(at_most_by_queue.values()))
    return {row["queue"]: row["n"] for row in rows}


async def depth(connection: Connection, queue: str, at_most: int) -> int:
    """The number of a queue's tasks that wait to run, now or later, counted up to `at_most`."""
    counted: int = await connection.fetchval(
        "SELECT count(*) FROM (SELECT 1 FROM task WHERE queue = $1 AND status IN ('pending', 'retry', 'waiting')"
        " LIMIT $2) AS counted",
        queue,
        at_most,
    )
    return counted


# $1: a worker without a heartbeat for this many seconds is silent. $2 and $3: when the last worker of the previous page
# started, and its id; NULL for the first page. $4: the page has at most this many workers.
WORKERS = """
-- workers
SELECT w.id, w.host, w.pid, w.version, w.pool, w.queues, w.draining, w.started_at, w.seen_at,
       w.seen_at <= statement_timestamp() - make_interval(secs => $1) AS silent,
       coalesce(lease_count.leases, 0) AS leases
FROM worker w
LEFT JOIN (SELECT t.lease_owner, count(*) AS leases FROM task t WHERE t.status = 'running' GROUP BY t.lease_owner)
  AS lease_count ON lease_count.lease_owner = w.id
WHERE $2::timestamptz IS NULL OR (w.started_at, w.id) > ($2, $3::uuid)
ORDER BY w.started_at, w.id LIMIT $4
"""


async def workers(
    connection: Connection,
    silent_seconds: float,
    *,
    after: tuple[datetime, UUID] | None = None,
    limit: int = MAX_LISTED,
) -> Sequence[Row]:
    """The registered workers, the oldest first, each with the number of tasks that it has leased. `silent`: the worker
    has had no heartbeat for `silent_seconds`. In most cases such a worker has died, but its row still exists. `after`:
    the start and the id of the last worker of the previous page; None: this is the first page. `limit`: the page has at
    most this many workers.
    """
    return await connection.fetch(WORKERS, silent_seconds, *(after or (None, None)), limit)
