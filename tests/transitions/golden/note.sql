-- note
WITH held AS MATERIALIZED (
    SELECT t.id FROM task t
    WHERE t.id = $1 AND t.lease_owner = $2 AND t.epoch = $3 AND t.status = 'running'
    FOR SHARE
)
INSERT INTO note (task_id, value) SELECT id, $4::jsonb FROM held
ON CONFLICT (task_id) DO UPDATE SET value = excluded.value
RETURNING task_id
