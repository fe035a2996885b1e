-- claimed_with
SELECT DISTINCT ON (t.id) t.id AS task_id, c.id AS next
FROM task t JOIN task c ON c.id = ANY(t.unblocks)
WHERE t.id = ANY($1::uuid[]) AND c.status = 'running' AND c.lease_owner = $2 AND c.id <> ALL($3::uuid[])
ORDER BY t.id, c.position
