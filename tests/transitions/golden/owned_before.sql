-- owned_before
SELECT t.id, t.epoch FROM task t
WHERE t.status = 'running' AND t.lease_owner = $1 AND t.lease_until < $2::timestamptz + $3::interval
