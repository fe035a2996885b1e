-- renew
WITH lease AS (
    SELECT l.id, l.epoch FROM unnest($2::uuid[], $3::int[]) AS l(id, epoch)
), locked_tasks AS MATERIALIZED (
    SELECT t.id
    FROM lease JOIN task t ON t.id = lease.id
    WHERE t.lease_owner = $1 AND t.epoch = lease.epoch AND CASE WHEN t.status = 'running' THEN true ELSE false END
    ORDER BY t.id
    FOR UPDATE OF t SKIP LOCKED
), renewed_tasks AS (
    UPDATE task t SET lease_until = clock_timestamp() + $4::interval
    FROM locked_tasks WHERE t.id = locked_tasks.id
    RETURNING t.id
)
SELECT lease.id,
       renewed_tasks.id IS NOT NULL AS renewed,
       coalesce(t.status = 'running' AND t.lease_owner = $1 AND t.epoch = lease.epoch, false) AS is_valid,
       coalesce(j.status = 'cancel_requested' AND t.cancelable, false) AS cancel
FROM lease
LEFT JOIN renewed_tasks ON renewed_tasks.id = lease.id
LEFT JOIN task t ON t.id = lease.id
LEFT JOIN job j ON j.id = t.job_id
