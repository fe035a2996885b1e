-- job_delete
WITH deleted AS (
    UPDATE job SET keep_seconds = 0, expires_at = clock_timestamp()
    WHERE id = ANY($1::uuid[]) AND CASE WHEN tenant_id = $2 AND finished_at IS NOT NULL THEN true ELSE false END
    RETURNING id, tenant_id, pipeline, output_prefix
), remembered AS (
    INSERT INTO tombstone (job_id, tenant_id, pipeline, is_run, because)
    SELECT g.id, g.tenant_id, g.pipeline, EXISTS (SELECT 1 FROM run r WHERE r.job_id = g.id), 'deleted' FROM deleted g
    ON CONFLICT (job_id) DO NOTHING
)
SELECT id, output_prefix FROM deleted
