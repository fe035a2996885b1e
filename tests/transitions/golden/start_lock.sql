-- start_lock
SELECT j.status = 'cancel_requested' AS cancelling,
       EXISTS (SELECT FROM journal e WHERE e.job_id = j.id AND e.branch = $4 AND e.number = $5) AS started
FROM task t JOIN job j ON j.id = t.job_id
WHERE t.id = $1 AND t.lease_owner = $2 AND t.epoch = $3
FOR UPDATE OF j
