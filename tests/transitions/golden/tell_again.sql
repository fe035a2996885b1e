-- tell_again
INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
SELECT t.id, t.job_id, t.queue, t.priority, j.trace, clock_timestamp() + interval '1 second'
FROM task t JOIN job j ON j.id = t.job_id
WHERE t.queue = $1 AND t.status IN ('pending', 'retry', 'waiting') AND t.available_at <= statement_timestamp()
  AND NOT starts_with(t.queue, 'ext:')
ORDER BY t.priority, t.available_at LIMIT 1000
RETURNING id AS outbox_id, task_id, queue, priority, headers
