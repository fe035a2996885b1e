-- signal
WITH stored_signal AS (
    INSERT INTO signal (job_id, tenant_id, name, payload)
    SELECT $1, $2, $3, coalesce($4::jsonb, 'null')
    WHERE (SELECT count(*) FROM (SELECT FROM signal s WHERE s.job_id = $1 LIMIT $5) AS unconsumed) < $5
    RETURNING id
), woken_workflow AS (
    -- Count the signal in `news`. A running workflow compares the count when it suspends. If the count has risen since
    -- the workflow read its journal, the workflow is due again immediately. A workflow that waits for this signal is
    -- due now. The UPDATE leaves out the steps that the workflow has started (`contained`). It also leaves out a
    -- workflow that was never claimed (`epoch` is 0), because such a workflow reads all signals when it starts. A step
    -- beside the workflow that snoozes (it is not `journaled`) stays as it is: it has asked for its delay.
    UPDATE task t
    SET news = t.news + 1,
        wake_at = CASE WHEN t.status = 'waiting' THEN NULL ELSE t.wake_at END,
        available_at = CASE t.status WHEN 'waiting' THEN clock_timestamp() ELSE t.available_at END
    FROM stored_signal
    WHERE t.job_id = $1 AND NOT t.contained AND t.epoch > 0
      AND CASE t.status
          WHEN 'running' THEN true
          WHEN 'waiting' THEN t.journaled AND EXISTS (
              SELECT 1 FROM journal e
              WHERE e.job_id = $1 AND e.kind = 'signal' AND e.state = 'open' AND e.name = $3)
          ELSE false END
    RETURNING t.id, t.job_id, t.queue, t.priority, t.status
), hints AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT w.id, w.job_id, w.queue, w.priority, (SELECT j.trace FROM job j WHERE j.id = w.job_id),
           clock_timestamp() + interval '1 second'
    FROM woken_workflow w WHERE w.status = 'waiting'
    RETURNING id, task_id, queue, priority, headers
)
SELECT s.id AS signal_id, h.id AS outbox_id, h.task_id, h.queue, h.priority, h.headers
FROM stored_signal s LEFT JOIN hints h ON true
