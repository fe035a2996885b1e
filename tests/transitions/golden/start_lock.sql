-- start_lock
SELECT j.id AS job_id, j.status = 'cancel_requested' AS cancelling, t.priority, j.trace
FROM task t JOIN job j ON j.id = t.job_id
WHERE t.id = $1 AND t.lease_owner = $2 AND t.epoch = $3
FOR UPDATE OF j
