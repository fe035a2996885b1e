-- gates_unused_lock
SELECT g.tenant_id, g.key FROM gate g
WHERE NOT g.declared
  AND NOT EXISTS (SELECT 1 FROM gate_job w WHERE w.tenant_id = g.tenant_id AND w.key = g.key)
LIMIT $1
FOR UPDATE SKIP LOCKED
