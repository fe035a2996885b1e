-- append_stream
WITH asynchronous AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'off', true) AS setting
), chunk AS MATERIALIZED (
    SELECT t.job_id, t.tenant_id, t.id, t.step, c.epoch, t.attempt, c.first, c.n, c.chunks, c.nth,
           CASE WHEN c.restarts OR c.epoch = 1 THEN c.restarts
                ELSE coalesce((SELECT CASE WHEN s.epoch = c.epoch THEN s.restarts ELSE s.attempt < t.attempt END
                               FROM job_stream s WHERE s.task_id = c.id ORDER BY s.epoch DESC, s.first DESC LIMIT 1),
                              false) END AS restarts,
           sum(c.n) OVER (PARTITION BY t.job_id ORDER BY c.nth) AS running_total, asynchronous.setting
    FROM asynchronous
    CROSS JOIN unnest($1::uuid[], $2::uuid[], $3::int[], $4::int[], $5::int[], $6::bool[], $7::jsonb[])
        WITH ORDINALITY AS c(owner, id, epoch, first, n, restarts, chunks, nth)
    JOIN task t ON t.id = c.id AND t.lease_owner = c.owner AND t.epoch = c.epoch AND CASE WHEN t.status = 'running' THEN true ELSE false END
), numbered AS (
    INSERT INTO tail AS o (job_id, stream_seq)
    SELECT job_id, sum(n) FROM chunk GROUP BY job_id ORDER BY job_id
    ON CONFLICT (job_id) DO UPDATE SET stream_seq = o.stream_seq + excluded.stream_seq
    RETURNING job_id, stream_seq
), total AS (
    SELECT job_id, sum(n) AS n FROM chunk GROUP BY job_id
)
INSERT INTO job_stream (job_id, last, tenant_id, task_id, step, epoch, attempt, first, n, restarts, chunks)
SELECT c.job_id, numbered.stream_seq - total.n + c.running_total, c.tenant_id, c.id, c.step, c.epoch, c.attempt,
       c.first, c.n, c.restarts, c.chunks
FROM chunk c JOIN numbered ON numbered.job_id = c.job_id JOIN total ON total.job_id = c.job_id
ORDER BY c.nth
ON CONFLICT (task_id, epoch, first) DO NOTHING
