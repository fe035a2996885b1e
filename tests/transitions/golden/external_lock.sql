-- external_lock
SELECT j.id FROM job j WHERE j.id = (SELECT t.job_id FROM task t WHERE t.id = $1 AND t.lease_owner = $2) FOR UPDATE
