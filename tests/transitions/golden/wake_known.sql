-- wake_known
WITH known_task AS MATERIALIZED (
    SELECT u.task_id, u.epoch, t.job_id FROM unknown_task u JOIN task t ON t.id = u.task_id
    WHERE u.queue = ANY($2::text[])
      AND (u.handler = ANY($3::text[])
           OR (u.handler LIKE '%, %' AND string_to_array(u.handler, ', ') <@ $3::text[]))
      AND NOT EXISTS (SELECT 1 FROM worker w WHERE w.id = $1 AND w.draining)
    LIMIT $4
    FOR UPDATE OF t SKIP LOCKED
), forgotten_rows AS (
    DELETE FROM unknown_task u USING known_task k WHERE u.task_id = k.task_id AND u.epoch = k.epoch
), woken_task AS (
    -- If the epoch differs, a worker has claimed the task since.
    UPDATE task t SET available_at = clock_timestamp()
    FROM known_task k JOIN job j ON j.id = k.job_id
    WHERE t.id = k.task_id AND t.epoch = k.epoch AND CASE WHEN t.status = 'waiting' THEN true ELSE false END
    RETURNING t.id, t.queue, t.priority, j.trace
)
SELECT w.id AS task_id, w.queue, w.priority, w.trace AS headers, NULL AS outbox_id
FROM known_task k LEFT JOIN woken_task w ON w.id = k.task_id
