-- gates_queue_up
INSERT INTO gate_job (tenant_id, key, job_id, priority, ready_at, owner)
SELECT g.tenant_id, g.key, g.job_id, g.priority, coalesce(g.ready_at, clock_timestamp()), g.owner
FROM unnest($1::text[], $2::text[], $3::uuid[], $4::smallint[], $5::timestamptz[], $6::text[])
    AS g(tenant_id, key, job_id, priority, ready_at, owner)
