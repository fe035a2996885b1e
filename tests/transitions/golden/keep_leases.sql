-- keep_leases
UPDATE task t SET lease_until = clock_timestamp() + $2::interval
FROM (
    SELECT mine.id FROM task mine JOIN worker w ON w.id = mine.lease_owner
    WHERE mine.status = 'running' AND mine.lease_owner = $1 AND mine.lease_until < clock_timestamp() + $2::interval
      AND w.incarnation <> greatest(pg_postmaster_start_time(), (SELECT stats_reset FROM pg_stat_bgwriter))
    ORDER BY mine.id FOR UPDATE OF mine SKIP LOCKED
) AS own_task
WHERE t.id = own_task.id
