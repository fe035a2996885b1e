-- expire_leases
WITH held AS MATERIALIZED (
    SELECT t.id, t.job_id, t.losses, t.contained FROM task t
    WHERE t.job_id = ANY($3::uuid[])
      AND t.status = 'running' AND (t.lease_until < clock_timestamp() OR t.lease_owner = ANY(ARRAY(
    SELECT was.id FROM unnest($1::uuid[]) AS was(id)
    WHERE NOT EXISTS (SELECT 1 FROM worker w WHERE w.id = was.id AND EXISTS (
    SELECT 1 FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.classid = 7305::oid AND l.objid = w.presence_key::oid)))))
    ORDER BY t.id
    FOR UPDATE OF t SKIP LOCKED
), judged AS MATERIALIZED (
    -- `ends`: one step was lost too often, and its job fails; all steps that the job lost in this batch fail with it.
    -- The job goes on without a step that its workflow started.
    SELECT held.id, held.losses >= $2 AS spent,
           bool_or(held.losses >= $2 AND NOT held.contained) OVER (PARTITION BY held.job_id) AS ends
    FROM held
), failed AS (
    UPDATE task t
    SET status = CASE WHEN judged.spent OR judged.ends THEN 'failed' ELSE 'pending' END,
        lease_owner = NULL, lease_until = NULL, losses = t.losses + 1, available_at = clock_timestamp(),
        finished_at = CASE WHEN judged.spent OR judged.ends THEN clock_timestamp() END
    FROM judged WHERE t.id = judged.id
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, t.status, t.available_at, t.queue, t.priority,
              t.contained, t.unblocks, judged.ends,
              'worker_lost' AS code, 'the worker was lost while it ran this step' AS message,
              'loss' AS cause, true AS retryable
), failures AS (
    INSERT INTO failure (task_id, epoch, cause, code, message, retryable)
    SELECT id, epoch, cause, code, message, retryable FROM failed
)
, rest AS (
    -- The other open steps of the jobs that fail.
    UPDATE task s
    SET status = CASE WHEN s.status = 'running' THEN 'cancelled' ELSE 'skipped' END,
        lease_owner = NULL, lease_until = NULL, finished_at = clock_timestamp()
    WHERE s.job_id IN (SELECT job_id FROM failed WHERE ends)
      AND s.id NOT IN (SELECT id FROM failed)
      AND s.status IN ('blocked', 'pending', 'running', 'retry', 'waiting')
    RETURNING s.id, s.job_id, s.step, s.position, s.epoch, s.status
), news AS (
    -- One event for each task, numbered within the job; the settled tasks come first.
    SELECT n.*, row_number() OVER (PARTITION BY job_id ORDER BY first, position) AS nth,
           count(*) OVER (PARTITION BY job_id) AS n
    FROM (
        SELECT 0 AS first, id, job_id, step, position, epoch, status, contained AND status = 'failed' AS given_up,
               jsonb_build_object('code', code, 'message', message, 'cause', cause,
                   'retry_at', CASE WHEN status <> 'failed' THEN available_at END) AS data
        FROM failed
        UNION ALL
        SELECT 1, id, job_id, step, position, epoch, status, false, NULL FROM rest
    ) AS n
), advanced AS (
    -- `ended`: the first failed step of a job that fails; its error becomes the job's.
    UPDATE job j
    SET status = CASE WHEN ended.code IS NULL THEN j.status ELSE 'failed' END,
        error = CASE WHEN ended.code IS NULL THEN j.error
                     ELSE jsonb_build_object('code', ended.code, 'message', ended.message, 'step', ended.step,
                                             'retryable', ended.retryable) END,
        finished_at = CASE WHEN ended.code IS NOT NULL THEN clock_timestamp() END,
        expires_at = CASE WHEN ended.code IS NOT NULL
                          THEN clock_timestamp() + make_interval(secs => j.keep_seconds) END,
        leased = CASE WHEN ended.code IS NULL THEN j.leased - mine.settled ELSE 0 END,
        steps_left = j.steps_left - mine.given_up,
        event_seq = j.event_seq + mine.n
    FROM (
        SELECT job_id, count(*)::int AS n, (count(*) FILTER (WHERE first = 0))::int AS settled,
               (count(*) FILTER (WHERE given_up))::int AS given_up
        FROM news GROUP BY job_id
    ) AS mine
    LEFT JOIN (
        SELECT DISTINCT ON (job_id) job_id, code, message, step, retryable FROM failed
        WHERE ends ORDER BY job_id, contained, position
    ) AS ended ON ended.job_id = mine.job_id
    WHERE j.id = mine.job_id
    RETURNING j.id, j.tenant_id, j.status, j.trace, j.event_seq - mine.n AS seq, j.pipeline,
              CASE WHEN ended.retryable THEN 'failed' ELSE 'rejected' END AS outcome,
              extract(epoch FROM clock_timestamp() - j.created_at)::float8 AS seconds
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT n.job_id, a.seq + n.nth, a.tenant_id,
           CASE n.status WHEN 'retry' THEN 'retried' WHEN 'pending' THEN 'lost' ELSE n.status END,
           CASE WHEN a.status = 'failed' AND n.nth < n.n THEN 'running' ELSE a.status END,
           n.id, n.step, n.status, n.epoch, n.data
    FROM news n JOIN advanced a ON a.id = n.job_id
), woken AS (
    -- The workflows whose steps gave up: an end like any other (settlements/completion.py).
    UPDATE task w
    SET news = w.news + gone.n, wake_at = CASE WHEN w.news + gone.n < w.wake_at THEN w.wake_at END,
        available_at = CASE WHEN w.status = 'waiting' AND w.news + gone.n >= w.wake_at THEN clock_timestamp()
                            ELSE w.available_at END
    FROM (
        SELECT parent, count(*)::int AS n FROM failed, unnest(failed.unblocks) AS parent
        WHERE contained AND status = 'failed' AND NOT ends GROUP BY parent
    ) AS gone
    WHERE w.id = gone.parent AND w.id NOT IN (SELECT id FROM failed)
      AND CASE WHEN (w.status = 'waiting' AND w.wake_at IS NOT NULL) OR w.status = 'running' THEN true ELSE false END
    RETURNING w.id, w.job_id, w.queue, w.priority, w.status, w.wake_at
), woken_hints AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT w.id, w.job_id, w.queue, w.priority, a.trace, clock_timestamp() + interval '1 second'
    FROM woken w JOIN advanced a ON a.id = w.job_id
    WHERE w.status = 'waiting' AND w.wake_at IS NULL
    RETURNING id, task_id, queue, priority, headers
)
, hinted AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT f.id, f.job_id, f.queue, f.priority, j.trace, clock_timestamp() + interval '1 second'
    FROM failed f JOIN job j ON j.id = f.job_id
    WHERE f.status = 'pending' AND NOT starts_with(f.queue, 'ext:')
    RETURNING id, task_id, queue, priority, headers
)
SELECT f.id AS task_id, f.status, h.id AS outbox_id, h.queue, h.priority, h.headers,
       e.id AS ended_job, e.pipeline, e.outcome, e.seconds
FROM failed f LEFT JOIN hinted h ON h.task_id = f.id LEFT JOIN advanced e ON e.id = f.job_id AND e.status = 'failed'
UNION ALL
SELECT h.task_id, NULL, h.id, h.queue, h.priority, h.headers, NULL, NULL, NULL, NULL FROM woken_hints h
