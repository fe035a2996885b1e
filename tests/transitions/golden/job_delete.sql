-- job_delete
WITH deleted AS (
    UPDATE job SET keep_seconds = 0, expires_at = clock_timestamp()
    WHERE id = ANY($1::uuid[]) AND CASE WHEN tenant_id = $2 AND finished_at IS NOT NULL THEN true ELSE false END
    RETURNING id, tenant_id, pipeline, output_prefix
), tombstones AS (
    INSERT INTO tombstone (job_id, tenant_id, pipeline, is_run, because)
    SELECT d.id, d.tenant_id, d.pipeline, EXISTS (SELECT 1 FROM run r WHERE r.job_id = d.id), 'deleted' FROM deleted d
    ON CONFLICT (job_id) DO NOTHING
)
SELECT id, output_prefix FROM deleted
