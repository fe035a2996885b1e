-- look
WITH RECURSIVE served_queues AS MATERIALIZED (
    -- The queues that are not paused, and the priorities (`band`) of each.
    SELECT q.queue, band FROM unnest($1::text[]) AS q(queue) CROSS JOIN generate_series(0, 2) AS band
    WHERE NOT EXISTS (SELECT 1 FROM paused_queue p WHERE p.queue = q.queue)
), tenants(queue, band, tenant_id) AS (
    -- The tenants with open tasks, by a loose index scan: one probe for each tenant, however many tasks it has.
    SELECT s.queue, s.band, first_task.tenant_id
    FROM served_queues s CROSS JOIN LATERAL (
        SELECT t.tenant_id FROM task t
        WHERE t.queue = s.queue AND t.priority = s.band AND t.status IN ('pending', 'retry', 'waiting')
          AND t.available_at >= statement_timestamp() - $5::interval
        ORDER BY t.tenant_id LIMIT 1
    ) AS first_task
    UNION ALL
    SELECT tenants.queue, tenants.band, next_task.tenant_id
    FROM tenants CROSS JOIN LATERAL (
        SELECT t.tenant_id FROM task t
        WHERE t.queue = tenants.queue AND t.priority = tenants.band AND t.status IN ('pending', 'retry', 'waiting')
          AND t.tenant_id > tenants.tenant_id AND t.available_at >= statement_timestamp() - $5::interval
        ORDER BY t.tenant_id LIMIT 1
    ) AS next_task
), counting AS MATERIALIZED (
    -- Whether this statement counts the running tasks. A single tenant needs no turns. Counting is slow, because it
    -- also reads the rows of tasks that have run and are not vacuumed yet.
    SELECT $6::text[] IS NULL AND count(DISTINCT tenant_id) > 1 AS is_needed FROM tenants
), running_counts AS MATERIALIZED (
    -- How many tasks each tenant has running: counted here, or passed by the caller.
    SELECT tenant_id, count(*) AS n FROM task
    WHERE status = 'running' AND (SELECT counting.is_needed FROM counting)
    GROUP BY tenant_id
    UNION ALL
    SELECT passed.tenant_id, passed.n FROM unnest($6::text[], $7::bigint[]) AS passed(tenant_id, n)
), shares AS MATERIALIZED (
    -- For each tenant: how many tasks run on this worker (`running_here`), and how many more the worker may claim
    -- (`room`). `overdue`: for how long the poll skips a due `pending` task, because the task has a hint.
    SELECT tenants.*, worker_share.n AS running_here,
           CASE WHEN worker_share.tenant_id IS NULL THEN $11 ELSE worker_share.room END AS room,
           CASE WHEN worker_share.tenant_id IS NULL THEN $13::interval ELSE $12::interval END AS overdue
    FROM tenants
    LEFT JOIN unnest($8::text[], $9::int[], $10::int[]) AS worker_share(tenant_id, n, room)
        ON worker_share.tenant_id = tenants.tenant_id
), heads AS MATERIALIZED (
    -- The oldest due tasks of each queue, priority and tenant. If a tenant has no room, the statement reads only the
    -- oldest task, for its age. `since`: when the task became due, plus half a minute for each lower priority.
    SELECT head.*, head.available_at + share.band * interval '30 seconds' AS since,
           share.tenant_id, share.running_here, share.room
    FROM shares share
    CROSS JOIN LATERAL (
        (SELECT t.id, t.job_id, t.status AS was, t.available_at FROM task t
         WHERE t.queue = share.queue AND t.priority = share.band AND t.tenant_id = share.tenant_id
           AND t.status IN ('pending', 'retry', 'waiting')
             AND t.available_at BETWEEN statement_timestamp() - $5::interval AND statement_timestamp()
             AND (t.status <> 'pending' OR t.available_at <= statement_timestamp() - share.overdue) AND share.room IS DISTINCT FROM 0
         ORDER BY t.available_at LIMIT 4 * $4)
        UNION ALL
        (SELECT t.id, t.job_id, t.status, t.available_at FROM task t
         WHERE t.queue = share.queue AND t.priority = share.band AND t.tenant_id = share.tenant_id
           AND t.status IN ('pending', 'retry', 'waiting')
             AND t.available_at BETWEEN statement_timestamp() - $5::interval AND statement_timestamp()
             AND (t.status <> 'pending' OR t.available_at <= statement_timestamp() - share.overdue) AND share.room = 0
         ORDER BY t.available_at LIMIT 1)
    ) AS head
), numbered_heads AS MATERIALIZED (
    -- `nth` numbers the tasks of each tenant, in all queues and priorities together.
    SELECT h.*, row_number() OVER (PARTITION BY h.tenant_id ORDER BY h.since) AS nth FROM heads h
), room_of_heads AS MATERIALIZED (
    -- Whether each task is within the room of its tenant.
    SELECT h.*, coalesce(h.nth <= h.room, true) AS has_room FROM numbered_heads h
), candidates AS MATERIALIZED (
    -- The tasks in the order in which tenants take turns. `turn`: the task's number within its tenant. The numbers
    -- begin after the tenant's running tasks.
    SELECT h.id, h.job_id, h.was, h.nth + greatest(running_counts.n, h.running_here, 0) AS turn, h.since
    FROM room_of_heads h LEFT JOIN running_counts ON running_counts.tenant_id = h.tenant_id
    WHERE h.has_room
    ORDER BY turn, since
    LIMIT 8 * $4
), job_tasks AS MATERIALIZED (
    -- Locks the jobs that no other statement has locked.
    SELECT c.id, c.was, j.event_seq, j.tenant_id, j.pipeline, j.pipeline_version, j.params, j.inputs, j.output_prefix, j.trace, j.gated, CASE WHEN j.cancel_by IS NULL THEN j.grace_seconds ELSE greatest(ceil(extract(epoch FROM j.cancel_by - clock_timestamp())), 0)::int END AS grace_seconds, j.status = 'cancel_requested' AS cancelling, j.single_task
    FROM candidates c JOIN job j ON j.id = c.job_id
    WHERE CASE WHEN j.finished_at IS NULL THEN true ELSE false END
    ORDER BY c.turn, c.since
    LIMIT $4
    FOR UPDATE OF j SKIP LOCKED
)
, claimed_tasks AS (
    UPDATE task t
    SET status = 'running',
        lease_owner = $2,
        lease_until = clock_timestamp() + $3::interval,
        epoch = t.epoch + 1,
        attempt = t.attempt + 1,
        losses = t.losses + (job_tasks.was = 'running')::int,
        started_at = clock_timestamp(),
        claim_seq = CASE WHEN t.id = job_tasks.single_task AND t.epoch = 0 THEN job_tasks.event_seq + 1
                         ELSE t.claim_seq END
    FROM job_tasks
    WHERE t.id = job_tasks.id AND (t.status = 'running') = (job_tasks.was = 'running')
      AND CASE WHEN t.status IN ('pending', 'retry', 'waiting') THEN true ELSE false END
      AND t.available_at <= clock_timestamp() AND (t.journaled OR NOT job_tasks.cancelling)
    RETURNING t.id, t.job_id, t.step, t.queue, t.priority, t.epoch, t.attempt, t.errors, t.crashes, t.handler,
              t.timeout_seconds, t.unblocks = '{}' AS is_last, job_tasks.was,
              t.epoch = 1 AND t.claim_seq IS NOT NULL AS has_derived_event,
              extract(epoch FROM clock_timestamp() - t.available_at)::float8 AS waited,
              job_tasks.event_seq, job_tasks.tenant_id, job_tasks.pipeline, job_tasks.pipeline_version, CASE WHEN t.contained THEN (SELECT i.value FROM item i WHERE i.task_id = t.id) ELSE job_tasks.params END AS params, job_tasks.inputs, CASE WHEN t.contained OR strpos(t.step, '.') > 0
                     THEN job_tasks.output_prefix || '/' || replace(t.step, '#', '.')
                   ELSE job_tasks.output_prefix END AS output_prefix, job_tasks.trace, job_tasks.gated, job_tasks.grace_seconds, job_tasks.cancelling
), numbered_tasks AS MATERIALIZED (
    -- The claimed tasks, numbered within their job for its events: `nth` of `task_count`. `leased`: how many of these
    -- tasks the job did not count as leased before. `becomes`: the job's new status.
    SELECT c.*, row_number() OVER (PARTITION BY job_id ORDER BY id) AS nth, (count(*) OVER job)::int AS task_count,
           (count(*) FILTER (WHERE was <> 'running' AND NOT cancelling) OVER job)::int AS leased,
           CASE WHEN cancelling THEN 'cancel_requested'
                WHEN bool_and(starts_with(queue, 'ext:')) OVER job THEN 'waiting_worker' ELSE 'running' END AS becomes
    FROM claimed_tasks c
    WINDOW job AS (PARTITION BY job_id)
), advanced_jobs AS (
    UPDATE job j
    SET status = per_job.becomes,
        leased = j.leased + per_job.leased,
        started_at = coalesce(j.started_at, clock_timestamp()),
        event_seq = j.event_seq + per_job.task_count
    FROM numbered_tasks per_job
    WHERE per_job.nth = 1 AND j.id = per_job.job_id
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT c.job_id, c.event_seq + c.nth, c.tenant_id, CASE WHEN c.was = 'running' THEN 'taken_over' ELSE 'claimed' END,
           c.becomes, c.id, c.step, 'running', c.epoch, jsonb_build_object('worker', $2::uuid, 'attempt', c.attempt)
    FROM numbered_tasks c WHERE NOT c.has_derived_event
)

SELECT numbered_tasks.*, oldest.seconds AS oldest,
       CASE WHEN counting.is_needed
            THEN coalesce((SELECT jsonb_object_agg(tenant_id, n) FROM running_counts), '{}') END AS running,
       EXISTS (SELECT 1 FROM room_of_heads WHERE NOT has_room) AS held_back
FROM (SELECT extract(epoch FROM max(statement_timestamp() - available_at))::float8 AS seconds FROM heads) AS oldest
CROSS JOIN counting
LEFT JOIN numbered_tasks ON true
ORDER BY numbered_tasks.id
