-- claimed_with
SELECT DISTINCT ON (t.id) t.id AS task_id, step.id AS next_step_id
FROM task t JOIN task step ON step.id = ANY(t.unblocks)
WHERE t.id = ANY($1::uuid[]) AND step.status = 'running' AND step.lease_owner = $2 AND step.id <> ALL($3::uuid[])
ORDER BY t.id, step.position
