-- job_forget
WITH deleted AS (
    DELETE FROM job WHERE id = ANY($1::uuid[]) AND expires_at < clock_timestamp()
    RETURNING id, tenant_id, pipeline, keep_seconds
)
INSERT INTO tombstone (job_id, tenant_id, pipeline, is_run, because)
SELECT d.id, d.tenant_id, d.pipeline, EXISTS (SELECT 1 FROM run r WHERE r.job_id = d.id),
       CASE WHEN d.keep_seconds = 0 THEN 'deleted' ELSE 'expired' END
FROM deleted d
ON CONFLICT (job_id) DO NOTHING
