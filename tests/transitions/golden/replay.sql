-- replay
WITH locked_jobs AS MATERIALIZED (
    SELECT j.id FROM job j
    WHERE j.id = ANY($1::uuid[]) AND CASE WHEN j.tenant_id = $2 AND j.status = 'failed' AND (j.expires_at IS NULL OR j.expires_at > clock_timestamp()) THEN true ELSE false END
    ORDER BY j.id
    FOR UPDATE
), outlived_workflows AS (
    -- If the workflow that started the job has ended, a duty (transitions/workflows/children.py) cancels the jobs of
    -- the workflow's open calls. This UPDATE closes the call, so that the duty does not cancel the job that now goes
    -- on. Exception: the workflow is replayed, too.
    UPDATE journal e SET state = 'done', value = '{"closed": true}'::jsonb
    FROM locked_jobs, job AS parent
    WHERE e.child_id = locked_jobs.id AND e.kind = 'start' AND e.state = 'open'
      AND parent.id = e.job_id AND CASE WHEN parent.finished_at IS NOT NULL THEN true ELSE false END
      AND parent.id NOT IN (SELECT id FROM locked_jobs)
), calls_again AS (
    DELETE FROM journal e USING (
        SELECT w.job_id, w.child_id, child.status
        FROM locked_jobs
        JOIN journal w ON w.job_id = locked_jobs.id AND w.kind = 'result' AND strpos(w.name, '#') > 0
        LEFT JOIN job child ON child.id = w.child_id
        WHERE w.value IS NULL
          AND coalesce(child.status, 'cancelled') IN ('failed', 'cancelled', 'expired', 'cancel_requested')
    ) AS ended
    WHERE e.job_id = ended.job_id AND e.child_id = ended.child_id
      AND (e.kind = 'result' OR (e.kind = 'start' AND ended.status IS DISTINCT FROM 'failed'))
    RETURNING e.job_id, e.branch, e.number
), reopened_calls AS (
    -- A replayed workflow waits again for the runs whose results it has not recorded: a duty wakes it only for open
    -- calls. Its runs that had failed are cancelled with it again. The duty has closed these calls (_CLOSE in
    -- transitions/workflows/children.py).
    UPDATE journal e SET state = 'open', value = NULL
    FROM locked_jobs
    WHERE e.job_id = locked_jobs.id AND e.state = 'done'
      AND CASE e.kind WHEN 'result' THEN e.value IS NULL WHEN 'start' THEN e.value = '{"closed": true}'::jsonb ELSE false END
      AND NOT EXISTS (SELECT FROM calls_again a
                      WHERE a.job_id = e.job_id AND a.branch = e.branch AND a.number = e.number)
), revived_steps AS (
    -- The steps that run again.
    UPDATE task t
    SET status = CASE WHEN t.waiting_on = 0 AND NOT $4 THEN 'pending' ELSE 'blocked' END,
        waiting_on = CASE WHEN t.waiting_on = 0 AND $4 THEN 1 ELSE t.waiting_on END,
        errors = 0, crashes = 0, losses = 0, finished_at = NULL, available_at = clock_timestamp()
    FROM locked_jobs, task AS before
    WHERE t.job_id = locked_jobs.id AND t.status IN ('failed', 'skipped', 'cancelled') AND NOT (t.status = 'skipped' AND t.epoch = 0
    AND NOT EXISTS (SELECT 1 FROM history e WHERE e.job_id = t.job_id AND e.task_id = t.id))
      AND NOT (t.contained AND t.status = 'failed'
    AND EXISTS (SELECT 1 FROM journal e WHERE e.job_id = t.job_id
                AND (e.at > t.finished_at OR (e.child_id = t.id AND e.state = 'failed')))) AND before.id = t.id
    RETURNING t.id, t.job_id, t.step, t.position, t.queue, t.priority, t.status, t.epoch,
              t.contained AND before.status = 'failed' AS uncounted
), step_counts AS MATERIALIZED (
    SELECT locked_jobs.id, count(r.id)::int AS steps, (count(*) FILTER (WHERE r.uncounted))::int AS uncounted,
           coalesce(bool_or(r.status = 'pending' AND NOT starts_with(r.queue, 'ext:')), false) AS runnable,
           coalesce(bool_or(r.status = 'pending' AND starts_with(r.queue, 'ext:')), false) AS runnable_externally
    FROM locked_jobs LEFT JOIN revived_steps r ON r.job_id = locked_jobs.id GROUP BY locked_jobs.id
), advanced_jobs AS (
    UPDATE job j
    SET status = CASE WHEN step_counts.runnable THEN 'queued' WHEN step_counts.runnable_externally THEN 'waiting_worker'
                      ELSE 'pending' END,
        error = NULL, finished_at = NULL, expires_at = NULL, leased = 0,
        params = coalesce($3::jsonb, j.params), held = $4, gated = j.gated OR $4,
        exclusive_key = CASE WHEN $5 THEN $6 ELSE j.exclusive_key END,
        -- The job gets as much time as it had at its submission, or at its last replay.
        deadline_at = clock_timestamp() + CASE
            WHEN j.timeout_seconds IS NOT NULL OR j.start_within_seconds IS NOT NULL
            THEN make_interval(secs => CASE WHEN $4 THEN j.start_within_seconds ELSE j.timeout_seconds END)
            WHEN j.deadline_at IS NULL THEN NULL
            ELSE j.deadline_at - coalesce(
                (SELECT max(e.at) FROM history e WHERE e.job_id = j.id AND e.kind = 'replayed'),
                (SELECT r.scheduled_at FROM run r WHERE r.job_id = j.id),
                j.created_at) END,
        notify = j.pipeline = ANY($7::text[])
            OR EXISTS (SELECT 1 FROM webhook w WHERE w.tenant_id = j.tenant_id AND w.enabled)
            OR EXISTS (SELECT 1 FROM job_callback c WHERE c.job_id = j.id),
        steps_left = j.steps_left + step_counts.uncounted,
        event_seq = j.event_seq + step_counts.steps
    FROM step_counts WHERE j.id = step_counts.id
    RETURNING j.id, j.tenant_id, j.status, j.trace, j.event_seq - step_counts.steps AS seq
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT r.job_id, a.seq + row_number() OVER (PARTITION BY r.job_id ORDER BY r.position), a.tenant_id, 'replayed',
           a.status, r.id, r.step, r.status, r.epoch, $9::jsonb
    FROM revived_steps r JOIN advanced_jobs a ON a.id = r.job_id
)
INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
SELECT r.id, r.job_id, r.queue, coalesce($8::int, r.priority), a.trace, clock_timestamp() + interval '1 second'
FROM revived_steps r JOIN advanced_jobs a ON a.id = r.job_id
WHERE r.status = 'pending' AND NOT starts_with(r.queue, 'ext:')
RETURNING id AS outbox_id, task_id, queue, priority, headers
