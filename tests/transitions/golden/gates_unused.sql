-- gates_unused
DELETE FROM gate g USING unnest($1::text[], $2::text[]) AS unused(tenant_id, key)
WHERE g.tenant_id = unused.tenant_id AND g.key = unused.key
  AND NOT EXISTS (SELECT 1 FROM gate_job w WHERE w.tenant_id = g.tenant_id AND w.key = g.key)
