-- resolve
WITH locked AS MATERIALIZED (
    SELECT j.id, j.tenant_id, j.status, j.event_seq FROM job j
    WHERE j.id = $1 AND j.tenant_id = $2 AND j.status = 'failed'
      AND (j.expires_at IS NULL OR j.expires_at > clock_timestamp())
    FOR UPDATE
), done AS (
    UPDATE task t SET status = 'succeeded', finished_at = clock_timestamp(), epoch = t.epoch + 1
    FROM locked WHERE t.job_id = locked.id AND t.step = $3 AND t.status = 'failed'
    RETURNING t.id, t.job_id, t.step, t.epoch, t.unblocks
), freed AS (
    UPDATE task c SET waiting_on = c.waiting_on - 1 FROM done WHERE c.id = ANY(done.unblocks)
), stored AS (
    INSERT INTO result (task_id, value) SELECT id, $4::jsonb FROM done
    ON CONFLICT (task_id) DO UPDATE SET value = excluded.value
), counted AS (
    UPDATE job j SET steps_left = j.steps_left - 1, event_seq = j.event_seq + 1 FROM done WHERE j.id = done.job_id
)
INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
SELECT l.id, l.event_seq + 1, l.tenant_id, 'completed', l.status, d.id, d.step, 'succeeded', d.epoch,
       jsonb_build_object('resolved_by', $5::text)
FROM locked l JOIN done d ON d.job_id = l.id
RETURNING task_id
