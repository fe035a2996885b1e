-- awaited_wake
WITH woken_workflows AS (
    UPDATE task t SET news = t.news + 1, wake_at = NULL, available_at = clock_timestamp()
    WHERE t.job_id = ANY($1::uuid[]) AND NOT t.contained AND t.journaled AND t.available_at > clock_timestamp()
      AND CASE WHEN t.status = 'waiting' THEN true ELSE false END
      AND EXISTS (SELECT 1 FROM journal e WHERE e.job_id = t.job_id AND e.kind = 'result' AND e.state = 'open'
      AND NOT EXISTS (SELECT 1 FROM job child WHERE child.id = e.child_id AND CASE WHEN child.finished_at IS NULL THEN true ELSE false END)
      AND e.due_at IS DISTINCT FROM coalesce((SELECT child.finished_at FROM job child WHERE child.id = e.child_id), 'epoch'))
    RETURNING t.id, t.job_id, t.queue, t.priority
), told AS (
    UPDATE journal e SET due_at = coalesce((SELECT child.finished_at FROM job child WHERE child.id = e.child_id), 'epoch') FROM woken_workflows w WHERE e.job_id = w.job_id AND e.kind = 'result' AND e.state = 'open'
      AND NOT EXISTS (SELECT 1 FROM job child WHERE child.id = e.child_id AND CASE WHEN child.finished_at IS NULL THEN true ELSE false END)
      AND e.due_at IS DISTINCT FROM coalesce((SELECT child.finished_at FROM job child WHERE child.id = e.child_id), 'epoch')
)
INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
SELECT w.id, w.job_id, w.queue, w.priority, (SELECT j.trace FROM job j WHERE j.id = w.job_id),
       clock_timestamp() + interval '1 second'
FROM woken_workflows w
RETURNING id AS outbox_id, task_id, queue, priority, headers
