-- awaited_wake
WITH woken_workflows AS (
    UPDATE task t SET news = t.news + 1, wake_at = NULL, available_at = clock_timestamp()
    WHERE t.job_id = ANY($1::uuid[]) AND NOT t.contained AND t.available_at > clock_timestamp()
      AND CASE WHEN t.status = 'waiting' THEN true ELSE false END
      AND EXISTS (
          SELECT 1 FROM journal e
          WHERE e.job_id = t.job_id AND e.kind = 'result' AND e.state = 'open' AND NOT EXISTS (
          SELECT 1 FROM job child WHERE child.id = e.child_id AND CASE WHEN child.finished_at IS NULL THEN true ELSE false END))
    RETURNING t.id, t.job_id, t.queue, t.priority
)
INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
SELECT w.id, w.job_id, w.queue, w.priority, (SELECT j.trace FROM job j WHERE j.id = w.job_id),
       clock_timestamp() + interval '1 second'
FROM woken_workflows w
RETURNING id AS outbox_id, task_id, queue, priority, headers
