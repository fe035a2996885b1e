-- renew
WITH held AS (
    SELECT l.id, l.epoch FROM unnest($2::uuid[], $3::int[]) AS l(id, epoch)
), locked AS MATERIALIZED (
    SELECT t.id
    FROM held JOIN task t ON t.id = held.id
    WHERE t.lease_owner = $1 AND t.epoch = held.epoch AND CASE WHEN t.status = 'running' THEN true ELSE false END
    ORDER BY t.id
    FOR UPDATE OF t SKIP LOCKED
), renewed AS (
    UPDATE task t SET lease_until = clock_timestamp() + $4::interval
    FROM locked WHERE t.id = locked.id
    RETURNING t.id
)
SELECT held.id,
       renewed.id IS NOT NULL AS renewed,
       coalesce(t.status = 'running' AND t.lease_owner = $1 AND t.epoch = held.epoch, false) AS is_valid,
       coalesce(j.status = 'cancel_requested' AND t.cancelable, false) AS cancel
FROM held
LEFT JOIN renewed ON renewed.id = held.id
LEFT JOIN task t ON t.id = held.id
LEFT JOIN job j ON j.id = t.job_id
