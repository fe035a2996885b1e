-- external_task
SELECT EXISTS (SELECT FROM task t WHERE t.id = $1 AND t.tenant_id = $2)
