-- append_log
WITH asynchronous AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'off', true) AS setting
), chunk AS MATERIALIZED (
    SELECT t.job_id, t.tenant_id, t.id, t.step, c.epoch, c.attempt, c.first, c.n, c.lines, c.nth,
           sum(c.n) OVER (PARTITION BY t.job_id ORDER BY c.nth) AS running_total, asynchronous.setting
    FROM asynchronous
    CROSS JOIN unnest($1::uuid[], $2::int[], $3::int[], $4::int[], $5::int[], $6::jsonb[])
        WITH ORDINALITY AS c(id, epoch, attempt, first, n, lines, nth)
    JOIN task t ON t.id = c.id
), numbered AS (
    INSERT INTO tail AS o (job_id, log_seq)
    SELECT job_id, sum(n) FROM chunk GROUP BY job_id ORDER BY job_id
    ON CONFLICT (job_id) DO UPDATE SET log_seq = o.log_seq + excluded.log_seq
    RETURNING job_id, log_seq
), total AS (
    SELECT job_id, sum(n) AS n FROM chunk GROUP BY job_id
)
INSERT INTO job_log (job_id, last, tenant_id, task_id, step, epoch, attempt, first, n, lines)
SELECT c.job_id, numbered.log_seq - total.n + c.running_total, c.tenant_id, c.id, c.step, c.epoch, c.attempt,
       c.first, c.n, c.lines
FROM chunk c JOIN numbered ON numbered.job_id = c.job_id JOIN total ON total.job_id = c.job_id
ORDER BY c.nth
ON CONFLICT (task_id, epoch, first) DO NOTHING
