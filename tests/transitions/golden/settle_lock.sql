-- settle_lock
SELECT FROM job j
WHERE j.id IN (SELECT t.job_id FROM task t WHERE t.id = ANY($1::uuid[]))
ORDER BY j.id
FOR UPDATE
