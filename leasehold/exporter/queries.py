"""The exporter's statements. Each reads small partial indexes or statistics, never a whole table.

A count stops at a cap. So a million waiting tasks cost no more to count than ten thousand. Both numbers mean the same
to an operator. The ORDER BY in most counts makes PostgreSQL read the index in order and stop at the cap. Without the
ORDER BY, PostgreSQL could use a bitmap scan, which first reads all entries. The statements use `now()` and not
`clock_timestamp()`, because PostgreSQL can search an index only for a value that is constant during a statement.
"""

from __future__ import annotations

from leasehold.db.task_lines import lines_of_all_queues
from leasehold.schedules.firing import DUTY as SCHEDULES
from leasehold.schedules.firing import IS_CATCHING_UP, MAY_BE_SERVED
from leasehold.transitions.sweeps import IS_FORGETTABLE

#: One round of the exporter reads at most this many lines (see QUEUES).
MAX_LINES = 2000
#: One round of the exporter reads at most this many leases. The number is higher than the cap of a count, because the
#: index does not show which leases have expired, so LEASES must read all leases up to this number.
MAX_LEASES = 100_000

# The waiting tasks and the workers of each queue. A line is the waiting tasks of one queue, priority (band) and tenant.
# The statement finds the lines by a loose index scan. The cap is divided among the lines of a queue: in each line, the
# statement counts up to `share.max_tasks`. `waiting_tasks`: the counts of tasks by queue. `serving_workers`: the number
# of workers by queue. A queue that workers serve has a row even if it has no tasks. $1: the cap. $2: a worker without a
# heartbeat for this many seconds is silent, and does not count. $3: the statement reads at most this many lines.
QUEUES = f"""
-- exporter_queues
WITH RECURSIVE {lines_of_all_queues("$3")}, share AS (
    SELECT queue, greatest($1 / count(*), 10) AS max_tasks FROM line GROUP BY queue
), waiting_tasks AS (
    SELECT line.queue, sum(due_tasks.n)::int AS due, sum(later_tasks.n)::int AS later, max(first_task.seconds) AS oldest
    FROM line JOIN share ON share.queue = line.queue
    CROSS JOIN LATERAL (
        SELECT count(*) AS n FROM (
            SELECT 1 FROM task t
            WHERE t.queue = line.queue AND t.priority = line.priority AND t.tenant_id = line.tenant_id
              AND t.status IN ('pending', 'retry', 'waiting') AND t.available_at <= now()
            ORDER BY t.available_at LIMIT share.max_tasks) AS capped
    ) AS due_tasks
    CROSS JOIN LATERAL (
        SELECT count(*) AS n FROM (
            SELECT 1 FROM task t
            WHERE t.queue = line.queue AND t.priority = line.priority AND t.tenant_id = line.tenant_id
              AND t.status IN ('pending', 'retry', 'waiting') AND t.available_at > now()
            ORDER BY t.available_at LIMIT share.max_tasks) AS capped
    ) AS later_tasks
    LEFT JOIN LATERAL (
        SELECT greatest(extract(epoch FROM now() - t.available_at), 0) AS seconds FROM task t
        WHERE t.queue = line.queue AND t.priority = line.priority AND t.tenant_id = line.tenant_id
          AND t.status IN ('pending', 'retry', 'waiting')
        ORDER BY t.available_at LIMIT 1
    ) AS first_task ON true
    GROUP BY line.queue
), serving_workers AS (
    SELECT q.queue, count(*) FILTER (WHERE NOT w.draining AND w.seen_at > now() - make_interval(secs => $2)) AS n
    FROM worker w, unnest(w.queues) AS q(queue) GROUP BY q.queue
)
SELECT queue, coalesce(waiting_tasks.due, 0) AS due, coalesce(waiting_tasks.later, 0) AS later,
       coalesce(waiting_tasks.oldest, 0)::float8 AS oldest, coalesce(serving_workers.n, 0)::int AS workers,
       EXISTS (SELECT 1 FROM paused_queue p
               WHERE p.queue = coalesce(waiting_tasks.queue, serving_workers.queue))::int AS paused
FROM waiting_tasks FULL JOIN serving_workers USING (queue)
"""

# The running tasks and the overdue leases of each queue. The statement reads the partial index of running tasks, the
# oldest tasks first. The index does not contain `lease_until`, so expired leases may be anywhere in it. $1: the cap.
# $2: the statement reads at most this many leases.
LEASES = """
-- exporter_leases
SELECT lease.queue, least(count(*), $1)::int AS running,
       coalesce(max(extract(epoch FROM now() - lease.started_at)), 0)::float8 AS oldest,
       least(count(*) FILTER (WHERE lease.lease_until < now()), $1)::int AS overdue,
       coalesce(max(extract(epoch FROM now() - lease.lease_until)) FILTER (WHERE lease.lease_until < now()), 0)::float8
           AS overdue_oldest
FROM (SELECT queue, started_at, lease_until FROM task WHERE status = 'running' ORDER BY id LIMIT $2) AS lease
GROUP BY lease.queue
"""

# SQL: whether the platform may be the reason why the schedule `s` is late. In two cases the platform is not the reason.
# First, `last_error` is about the due tick itself, and no worker has, or may have, the code of the template now.
# Second, the due tick was refused and the schedule is in quarantine, for example because of a limit of the tenant or a
# broken template. Then only the tenant can help. The listed codes are the exceptions to the second case, because the
# platform may be their reason: an error of the platform, a machine that is too busy to check a payload, and an error of
# the object store.
_IS_NOT_REFUSED = f"""(s.last_error -> 'tick' IS DISTINCT FROM to_jsonb(s.next_run_at) OR {MAY_BE_SERVED})
                 AND NOT EXISTS (
                     SELECT FROM quarantine q
                     WHERE q.duty = '{SCHEDULES}' AND q.unit = s.id::text AND q.retry_at > now()
                       AND q.error ->> 'code' NOT IN ('unforeseen', 'unreadable', 'evaluator_busy', 'store_error'))"""

# Counts of hints, dead letters and unfinished jobs. `outbox_oldest`, `schedule_oldest`: seconds for which the oldest
# hint has waited, and seconds for which the most overdue schedule has been due. A row of `outbox` is one hint (a
# message about a due task) that the broker has not confirmed, and a row of `outbox_batch` has several such hints. A
# dead letter is a failed task that no workflow started. (If a workflow started the task, `contained` is true, and the
# workflow handles the failure.) $1: the cap.
BACKLOG = f"""
-- exporter_backlog
SELECT least((SELECT count(*) FROM (SELECT 1 FROM outbox ORDER BY relay_at LIMIT $1) AS capped)
             + (SELECT coalesce(sum(cardinality(task_ids)), 0)
                FROM (SELECT task_ids FROM outbox_batch ORDER BY relay_at LIMIT $1) AS capped), $1)::int AS outbox,
       extract(epoch FROM now() - least(now(), (SELECT created_at FROM outbox ORDER BY id LIMIT 1),
                                        (SELECT created_at FROM outbox_batch ORDER BY id LIMIT 1)))::float8
           AS outbox_oldest,
       (SELECT count(*) FROM (SELECT 1 FROM task WHERE status = 'failed' AND NOT contained LIMIT $1) AS capped)::int
           AS dead_letters,
       (SELECT count(*) FROM (SELECT 1 FROM job WHERE finished_at IS NULL LIMIT $1) AS capped)::int AS unfinished,
       coalesce((SELECT greatest(extract(epoch FROM now() - s.next_run_at), 0) FROM schedule s
                 WHERE s.next_run_at IS NOT NULL AND {_IS_NOT_REFUSED} AND NOT {IS_CATCHING_UP}
                 ORDER BY s.next_run_at LIMIT 1), 0)::float8 AS schedule_oldest
"""

# The jobs that wait at concurrency limits (rows of `gate_job`). Their tasks are blocked, so QUEUES does not count them.
# The answer counts the jobs by the kind of the limit (`limit`), which is the first word of the limit's key. The rest of
# the key is left out, because it has names that a tenant chose. A job that waits at limits of two kinds counts for both
# kinds. Before `ready_at` a job waits for its time and not for the limit, so it does not count. A line is the waiting
# jobs of one limit (`tenant_id`, `key`), `owner` and `priority`. `tenant_id`: the tenant that has the limit. `owner`:
# the tenant of the job, because several tenants may use the same limit. `tenant` and `found` find the lines by a loose
# index scan. The cap is divided among the lines, and also bounds the number of lines: the statement takes the first
# line of each `tenant_id`, then the second line of each, and so on. $1: the cap.
HELD = """
-- exporter_held
WITH RECURSIVE tenant(tenant_id, nth) AS (
    (SELECT g.tenant_id, 1 FROM gate_job g WHERE g.admitted_at IS NULL ORDER BY g.tenant_id LIMIT 1)
    UNION ALL
    SELECT next.tenant_id, tenant.nth + 1
    FROM tenant CROSS JOIN LATERAL (
        SELECT g.tenant_id FROM gate_job g WHERE g.admitted_at IS NULL AND g.tenant_id > tenant.tenant_id
        ORDER BY g.tenant_id LIMIT 1) AS next
    WHERE tenant.nth < $1
), found(tenant_id, key, owner, priority) AS (
    SELECT tenant.tenant_id, first.key, first.owner, first.priority
    FROM tenant CROSS JOIN LATERAL (
        SELECT g.key, g.owner, g.priority FROM gate_job g
        WHERE g.admitted_at IS NULL AND g.tenant_id = tenant.tenant_id
        ORDER BY g.key, g.owner, g.priority LIMIT 1) AS first
    UNION ALL
    SELECT found.tenant_id, next.key, next.owner, next.priority
    FROM found CROSS JOIN LATERAL (
        SELECT g.key, g.owner, g.priority FROM gate_job g
        WHERE g.admitted_at IS NULL AND g.tenant_id = found.tenant_id
          AND (g.key, g.owner, g.priority) > (found.key, found.owner, found.priority)
        ORDER BY g.key, g.owner, g.priority LIMIT 1) AS next
), line AS MATERIALIZED (
    SELECT * FROM found LIMIT $1
), share AS (
    SELECT greatest($1 / greatest(count(*), 1), 1) AS max_jobs FROM line
)
SELECT split_part(line.key, ':', 1) AS "limit", count(DISTINCT waiting.job_id)::int AS jobs,
       extract(epoch FROM now() - min(waiting.ready_at))::float8 AS oldest
FROM line CROSS JOIN share CROSS JOIN LATERAL (
    SELECT g.job_id, g.ready_at FROM gate_job g
    WHERE g.admitted_at IS NULL AND g.tenant_id = line.tenant_id AND g.key = line.key AND g.owner = line.owner
      AND g.priority = line.priority AND g.ready_at <= now()
    ORDER BY g.ready_at, g.job_id LIMIT share.max_jobs) AS waiting
GROUP BY 1
"""

# The tasks that wait for a worker with their code, by queue. A worker without the code snoozes such a task, and records
# it in `unknown_task`. So the task is not due, and QUEUES counts it as `later`. The record is void after the task's
# next claim, because a claim raises the epoch. The answer has at most 100 queues. The queues with the most such tasks
# come first. A queue that workers serve may have a row even if it has no such task. $1: the cap.
WITHOUT_CODE = """
-- exporter_without_code
SELECT queue, count(waiting.id)::int AS n
FROM (SELECT DISTINCT unnest(w.queues) AS queue FROM worker w) AS served_queue
FULL JOIN (
    SELECT t.queue, t.id FROM (SELECT task_id, epoch FROM unknown_task ORDER BY task_id LIMIT $1) AS put_off
    JOIN task t ON t.id = put_off.task_id AND t.epoch = put_off.epoch AND t.finished_at IS NULL
) AS waiting USING (queue)
GROUP BY queue ORDER BY n DESC, queue LIMIT 100
"""

# Counts the registered workers by their state. $1: a worker without a heartbeat for this many seconds is silent.
WORKERS = """
-- exporter_workers
SELECT count(*) FILTER (WHERE has_heartbeat AND NOT draining)::int AS serving,
       count(*) FILTER (WHERE has_heartbeat AND draining)::int AS draining,
       count(*) FILTER (WHERE NOT has_heartbeat)::int AS silent
FROM (SELECT draining, seen_at > now() - make_interval(secs => $1) AS has_heartbeat FROM worker) AS w
"""

# The units (single things on which a duty works) that failed and are tried again later, by duty (a maintenance loop).
QUARANTINE = """
-- exporter_quarantine
SELECT duty, count(*)::int AS n FROM quarantine WHERE retry_at > now() GROUP BY duty
"""

# Finds, among the jobs that retention may delete now, the job that expired first. Returns how many seconds ago it
# expired. Many expired jobs may have to stay, so the statement reads at most $1 expired jobs (the cap).
RETENTION = f"""
-- exporter_retention
SELECT coalesce((SELECT extract(epoch FROM now() - job.expires_at)
                 FROM (SELECT * FROM job WHERE expires_at < now() ORDER BY expires_at LIMIT $1) AS job
                 WHERE {IS_FORGETTABLE} ORDER BY job.expires_at LIMIT 1), 0)::float8 AS oldest
"""

# The numbers of rows are PostgreSQL's estimates; the sizes come from the file system. Events have one table for each
# day. The answer has one row for all tables of events together.
TABLES = r"""
-- exporter_tables
SELECT regexp_replace(relname, '^event_.*', 'event') AS name, sum(n_live_tup)::float8 AS live,
       sum(n_dead_tup)::float8 AS dead, sum(pg_total_relation_size(relid))::float8 AS bytes
FROM pg_stat_user_tables WHERE schemaname = current_schema() GROUP BY 1
"""

# The sessions of this database, by state. `statement_oldest`: for how long the longest statement has run. Only members
# of pg_read_all_stats see what the sessions of other roles do. Every role sees what its own sessions do.
SESSIONS = """
-- exporter_sessions
SELECT coalesce(state, 'other') AS state, count(*)::int AS n,
       coalesce(max(extract(epoch FROM now() - query_start)) FILTER (WHERE state = 'active'), 0)::float8
           AS statement_oldest
FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
GROUP BY 1
"""

# The oldest snapshot that keeps vacuum from deleting rows in the tables of this database. It may belong to a
# transaction, a prepared transaction, a standby with hot_standby_feedback, or the replication slot of such a standby. A
# transaction's own id also counts, because a transaction keeps its id between two statements, but not always its
# snapshot. A slot's `catalog_xmin` does not count, because it keeps only rows of the system catalogs. Autovacuum's own
# workers, which have no `usesysid`, do not count. `age`: how many transactions began since the oldest snapshot.
# `oldest`: the greatest age in seconds, among the snapshots for which PostgreSQL shows this role a time. `next_xid`:
# the next transaction's id, with 64 bits.
SNAPSHOTS = """
-- exporter_snapshots
SELECT coalesce(max(held.age), 0)::bigint AS age, coalesce(max(held.seconds), 0)::float8 AS oldest,
       pg_snapshot_xmax(pg_current_snapshot())::text::bigint + age(pg_snapshot_xmax(pg_current_snapshot())::xid)
           AS next_xid
FROM (
    SELECT greatest(age(backend_xmin), age(backend_xid)) AS age, extract(epoch FROM now() - xact_start) AS seconds
    FROM pg_stat_activity
    WHERE pid <> pg_backend_pid() AND usesysid IS NOT NULL AND (datname = current_database() OR datname IS NULL)
      AND coalesce(backend_xmin, backend_xid) IS NOT NULL
    UNION ALL
    SELECT age(xmin), NULL FROM pg_replication_slots WHERE xmin IS NOT NULL AND wal_status IS DISTINCT FROM 'lost'
    UNION ALL
    SELECT age(transaction), extract(epoch FROM now() - prepared) FROM pg_prepared_xacts
    WHERE database = current_database()
) AS held
"""

# Counts, by name, the statements that have run for more than a second. The first line of each statement of the platform
# has its name. All other statements are counted as `other`.
SLOW = r"""
-- exporter_slow
SELECT CASE WHEN starts_with(application_name, 'leasehold ')
            THEN coalesce(substring(query FROM '^\s*-- ([a-z_]{1,40})\n'), 'other') ELSE 'other' END AS statement,
       count(*)::int AS n
FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
  AND state = 'active' AND query_start < now() - interval '1 second'
GROUP BY 1
"""

# The size of the database, and how many sessions the server allows.
DATABASE = """
-- exporter_database
SELECT pg_database_size(current_database())::float8 AS bytes, current_setting('max_connections')::int AS max_sessions
"""
