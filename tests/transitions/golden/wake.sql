-- wake
WITH woken AS (
    UPDATE task t SET available_at = clock_timestamp()
    FROM job j
    WHERE j.id = $1 AND j.tenant_id = $2 AND CASE WHEN j.finished_at IS NULL THEN true ELSE false END
      AND t.job_id = j.id AND t.step = $3 AND NOT starts_with(t.queue, 'ext:')
      AND t.epoch > 0 -- it has run before: a step that has never run waits for its start time
      AND CASE WHEN t.status = 'waiting' THEN true ELSE false END
    RETURNING t.id, t.job_id, t.queue, t.priority, j.trace
)
INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
SELECT id, job_id, queue, priority, trace, clock_timestamp() + interval '1 second' FROM woken
RETURNING id AS outbox_id, task_id, queue, priority, headers
