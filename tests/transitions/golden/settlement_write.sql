-- settlement_write
INSERT INTO settlement (task_id, epoch, job_id, tenant_id, action, system, ref, actor)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
ON CONFLICT (task_id, epoch) DO NOTHING
RETURNING true
