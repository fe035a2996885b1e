-- external_lock
SELECT (SELECT j.id FROM job j WHERE j.id = t.job_id AND t.lease_owner = $2 FOR UPDATE) AS locked
FROM task t WHERE t.id = $1 AND t.tenant_id = $3
