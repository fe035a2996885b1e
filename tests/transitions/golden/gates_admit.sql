-- gates_admit
WITH jobs AS MATERIALIZED (
    SELECT j.id, j.tenant_id, j.status, j.event_seq, j.trace
    FROM job j WHERE j.id = ANY($1::uuid[]) AND j.held AND CASE WHEN j.finished_at IS NULL THEN true ELSE false END
    ORDER BY j.id FOR UPDATE
), admissions AS (
    UPDATE gate_job g SET admitted_at = clock_timestamp() FROM jobs WHERE g.job_id = jobs.id
), first_steps AS (
    -- The first steps can run now, or wait for their start time. A workflow is a first step, too: it does not need the
    -- steps that it started (`contained`).
    UPDATE task t
    SET waiting_on = t.waiting_on - 1,
        status = CASE WHEN t.available_at > clock_timestamp() THEN 'waiting' ELSE 'pending' END,
        available_at = greatest(t.available_at, clock_timestamp())
    FROM jobs
    WHERE t.job_id = jobs.id AND t.status = 'blocked' AND t.waiting_on = 1
      AND NOT EXISTS (SELECT 1 FROM task p WHERE p.job_id = t.job_id AND t.id = ANY(p.unblocks)
                        AND p.status <> 'succeeded' AND NOT p.contained)
    RETURNING t.id, t.job_id, t.queue, t.priority, t.status, jobs.tenant_id, jobs.status AS job_status,
              jobs.event_seq, jobs.trace
), numbered_steps AS MATERIALIZED (
    -- The first steps, numbered within their job, with the job's next status: `waiting_worker` if they are all for
    -- external workers (queues `ext:`), else `queued` if one of them is due for a worker of the platform.
    SELECT f.*, row_number() OVER (PARTITION BY job_id ORDER BY id) AS nth,
           CASE WHEN bool_and(starts_with(queue, 'ext:')) OVER (PARTITION BY job_id)
                THEN 'waiting_worker'
                WHEN job_status = 'pending' AND bool_or(status = 'pending' AND NOT starts_with(queue, 'ext:'))
                    OVER (PARTITION BY job_id) THEN 'queued' ELSE job_status END AS next_job_status
    FROM first_steps f
), advanced_jobs AS (
    UPDATE job j
    SET held = false, event_seq = j.event_seq + 1, status = per_job.next_job_status,
        -- While the job was held, `deadline_at` was the end of `start_within_seconds`. Now it is the end of
        -- `timeout_seconds` (null: no limit). If both are null, the client may have set the deadline: it stays.
        deadline_at = CASE WHEN j.timeout_seconds IS NULL AND j.start_within_seconds IS NULL THEN j.deadline_at
                           ELSE clock_timestamp() + make_interval(secs => j.timeout_seconds) END
    FROM numbered_steps per_job WHERE per_job.nth = 1 AND j.id = per_job.job_id
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status)
    SELECT job_id, event_seq + 1, tenant_id, 'admitted', next_job_status FROM numbered_steps WHERE nth = 1
)
INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
SELECT id, job_id, queue, priority, trace, clock_timestamp() + interval '1 second'
FROM numbered_steps
WHERE status = 'pending' AND NOT starts_with(queue, 'ext:')
RETURNING id AS outbox_id, task_id, queue, priority, headers
