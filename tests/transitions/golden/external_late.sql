-- external_late
SELECT t.started_at + make_interval(secs => t.timeout_seconds) < clock_timestamp() FROM task t
WHERE t.id = $1 AND t.lease_owner = $2 AND t.epoch = $3 AND CASE WHEN t.status = 'running' THEN true ELSE false END
