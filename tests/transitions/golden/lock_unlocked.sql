-- lock_unlocked
SELECT t.id FROM task t JOIN job j ON j.id = t.job_id
WHERE t.id = ANY($1::uuid[])
ORDER BY j.id, t.id
FOR UPDATE OF j, t SKIP LOCKED
