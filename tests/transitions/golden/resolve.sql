-- resolve
WITH locked_job AS MATERIALIZED (
    SELECT j.id, j.tenant_id, j.status, j.event_seq FROM job j
    WHERE j.id = $1 AND j.tenant_id = $2 AND j.status = 'failed'
      AND (j.expires_at IS NULL OR j.expires_at > clock_timestamp())
    FOR UPDATE
), resolved_step AS (
    UPDATE task t SET status = 'succeeded', finished_at = clock_timestamp(), epoch = t.epoch + 1
    FROM locked_job WHERE t.job_id = locked_job.id AND t.step = $3 AND t.status = 'failed'
    RETURNING t.id, t.job_id, t.step, t.epoch, t.unblocks
), dependents AS (
    UPDATE task c SET waiting_on = c.waiting_on - 1 FROM resolved_step WHERE c.id = ANY(resolved_step.unblocks)
), results AS (
    INSERT INTO result (task_id, value) SELECT id, $4::jsonb FROM resolved_step
    ON CONFLICT (task_id) DO UPDATE SET value = excluded.value
), changed_job AS (
    UPDATE job j SET steps_left = j.steps_left - 1, event_seq = j.event_seq + 1
    FROM resolved_step WHERE j.id = resolved_step.job_id
)
INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
SELECT l.id, l.event_seq + 1, l.tenant_id, 'completed', l.status, d.id, d.step, 'succeeded', d.epoch,
       jsonb_build_object('resolved_by', $5::text)
FROM locked_job l JOIN resolved_step d ON d.job_id = l.id
RETURNING task_id
