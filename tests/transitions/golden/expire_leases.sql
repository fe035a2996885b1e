-- expire_leases
WITH lost_task AS MATERIALIZED (
    SELECT t.id, t.job_id, t.losses, t.contained FROM task t
    WHERE t.job_id = ANY($3::uuid[])
      AND t.status = 'running' AND ((t.lease_until < clock_timestamp()
    AND (t.lease_until < clock_timestamp() - interval '10 seconds' OR (
        SELECT w.incarnation <> greatest(pg_postmaster_start_time(), (SELECT stats_reset FROM pg_stat_bgwriter)) FROM worker w WHERE w.id = t.lease_owner) IS NOT TRUE)) OR t.lease_owner = ANY(ARRAY(
    SELECT owner.id FROM unnest($1::uuid[]) AS owner(id)
    WHERE NOT EXISTS (SELECT 1 FROM worker w WHERE w.id = owner.id AND EXISTS (
    SELECT 1 FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.classid = 7305::oid AND l.objid = w.presence_key::oid)))))
    ORDER BY t.id
    FOR UPDATE OF t SKIP LOCKED
), decisions AS MATERIALIZED (
    -- `lost_too_often`: the task fails. `ends`: its job fails, too, with all tasks of the job in this batch. A step
    -- that a workflow started (`contained`) does not fail its job.
    SELECT l.id, l.losses >= $2 AS lost_too_often,
           bool_or(l.losses >= $2 AND NOT l.contained) OVER (PARTITION BY l.job_id) AS ends
    FROM lost_task l
), attempt_ended AS (
    UPDATE task t
    SET status = CASE WHEN decisions.lost_too_often OR decisions.ends THEN 'failed' ELSE 'pending' END,
        lease_owner = NULL, lease_until = NULL, losses = t.losses + 1, available_at = clock_timestamp(),
        finished_at = CASE WHEN decisions.lost_too_often OR decisions.ends THEN clock_timestamp() END
    FROM decisions WHERE t.id = decisions.id
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, t.status, t.available_at, t.queue, t.priority,
              t.contained, t.unblocks, t.handler, decisions.ends, NOT decisions.lost_too_often AS again,
              'worker_lost' AS code, 'the worker was lost while it ran this step' AS message,
              'loss' AS cause, true AS retryable
), failures AS (
    INSERT INTO failure (task_id, epoch, cause, code, message, retryable)
    SELECT id, epoch, cause, code, message, retryable FROM attempt_ended
)
, other_steps AS (
    -- The other open steps of the jobs that fail.
    UPDATE task s
    SET status = CASE WHEN s.status = 'running' THEN 'cancelled' ELSE 'skipped' END,
        lease_owner = NULL, lease_until = NULL, finished_at = clock_timestamp()
    WHERE s.job_id IN (SELECT job_id FROM attempt_ended WHERE ends)
      AND s.id NOT IN (SELECT id FROM attempt_ended)
      AND s.status IN ('blocked', 'pending', 'running', 'retry', 'waiting')
    RETURNING s.id, s.job_id, s.step, s.position, s.epoch, s.status
), task_events AS (
    -- One event for each task, numbered within the job: `nth` of `event_count`. The ended attempts come first.
    SELECT changed.*, row_number() OVER (PARTITION BY job_id ORDER BY sort_group, position) AS nth,
           count(*) OVER (PARTITION BY job_id) AS event_count
    FROM (
        SELECT 0 AS sort_group, id, job_id, step, position, epoch, status,
               contained AND status = 'failed' AS given_up,
               jsonb_build_object('code', code, 'message', message, 'cause', cause,
                   'retry_at', CASE WHEN status <> 'failed' THEN available_at END) AS data
        FROM attempt_ended
        UNION ALL
        SELECT 1, id, job_id, step, position, epoch, status, false, NULL FROM other_steps
    ) AS changed
), per_job AS (
    SELECT job_id, count(*)::int AS event_count, (count(*) FILTER (WHERE sort_group = 0))::int AS attempts,
           (count(*) FILTER (WHERE given_up))::int AS given_up
    FROM task_events GROUP BY job_id
), job_error AS (
    -- A job that fails gets the error of one ended step. A step that may not run again comes first, then a step that
    -- no workflow started, then the step with the lowest position.
    SELECT DISTINCT ON (job_id) job_id, code, message, step, retryable FROM attempt_ended
    WHERE ends ORDER BY job_id, again, contained, position
), advanced_jobs AS (
    -- `leased`: how many of the job's steps are held by workers. `steps_left`: how many have not ended.
    UPDATE job j
    SET status = CASE WHEN job_error.code IS NULL THEN j.status ELSE 'failed' END,
        error = CASE WHEN job_error.code IS NULL THEN j.error
                     ELSE jsonb_build_object('code', job_error.code, 'message', job_error.message,
                                             'step', job_error.step, 'retryable', job_error.retryable) END,
        finished_at = CASE WHEN job_error.code IS NOT NULL THEN clock_timestamp() END,
        expires_at = CASE WHEN job_error.code IS NOT NULL
                          THEN clock_timestamp() + make_interval(secs => j.keep_seconds) END,
        leased = CASE WHEN job_error.code IS NULL THEN j.leased - per_job.attempts ELSE 0 END,
        steps_left = j.steps_left - per_job.given_up,
        event_seq = j.event_seq + per_job.event_count
    FROM per_job LEFT JOIN job_error ON job_error.job_id = per_job.job_id
    WHERE j.id = per_job.job_id
    RETURNING j.id, j.tenant_id, j.status, j.trace, j.event_seq - per_job.event_count AS seq, j.pipeline,
              CASE WHEN job_error.retryable THEN 'failed'
                   WHEN NOT job_error.retryable THEN 'rejected' END AS outcome,
              extract(epoch FROM clock_timestamp() - j.created_at)::float8 AS seconds
), events AS (
    -- A job that fails shows its new status in its last event only.
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT e.job_id, a.seq + e.nth, a.tenant_id,
           CASE e.status WHEN 'retry' THEN 'retried' WHEN 'pending' THEN 'lost' ELSE e.status END,
           CASE WHEN a.status = 'failed' AND e.nth < e.event_count THEN 'running' ELSE a.status END,
           e.id, e.step, e.status, e.epoch, e.data
    FROM task_events e JOIN advanced_jobs a ON a.id = e.job_id
), woken_workflows AS (
    -- The workflows whose steps have failed for good. `news` counts the ended steps and the signals of a workflow. If
    -- `news` reaches `wake_at` (settlements/completion.py), the workflow is due now. Then `wake_at` becomes null, and
    -- `woken_hints` writes a hint.
    UPDATE task w
    SET news = w.news + failed.steps, wake_at = CASE WHEN w.news + failed.steps < w.wake_at THEN w.wake_at END,
        available_at = CASE WHEN w.status = 'waiting' AND w.news + failed.steps >= w.wake_at THEN clock_timestamp()
                            ELSE w.available_at END
    FROM (
        SELECT workflow, count(*)::int AS steps
        FROM attempt_ended, unnest(attempt_ended.unblocks) AS workflow
        WHERE contained AND status = 'failed' AND NOT ends GROUP BY workflow
    ) AS failed
    WHERE w.id = failed.workflow AND w.id NOT IN (SELECT id FROM attempt_ended)
      AND CASE WHEN (w.status = 'waiting' AND w.wake_at IS NOT NULL) OR w.status = 'running' THEN true ELSE false END
    RETURNING w.id, w.job_id, w.queue, w.priority, w.status, w.wake_at
), woken_hints AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT w.id, w.job_id, w.queue, w.priority, a.trace, clock_timestamp() + interval '1 second'
    FROM woken_workflows w JOIN advanced_jobs a ON a.id = w.job_id
    WHERE w.status = 'waiting' AND w.wake_at IS NULL
    RETURNING id, task_id, queue, priority, headers
)
, hints AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT f.id, f.job_id, f.queue, f.priority, j.trace, clock_timestamp() + interval '1 second'
    FROM attempt_ended f JOIN job j ON j.id = f.job_id
    WHERE f.status = 'pending' AND NOT starts_with(f.queue, 'ext:')
    RETURNING id, task_id, queue, priority, headers
)
SELECT f.id AS task_id, f.status, f.step, f.handler, h.id AS outbox_id, h.queue, h.priority, h.headers,
       f.status = 'failed' AND NOT f.contained AS is_dead_letter,
       CASE WHEN e.status = 'failed' THEN e.id END AS ended_job, e.pipeline, e.outcome, e.seconds
FROM attempt_ended f JOIN advanced_jobs e ON e.id = f.job_id LEFT JOIN hints h ON h.task_id = f.id
UNION ALL
SELECT h.task_id, NULL, NULL, NULL, h.id, h.queue, h.priority, h.headers, NULL, NULL, NULL, NULL, NULL
FROM woken_hints h
