-- job_forget
WITH deleted AS (
    DELETE FROM job WHERE id = ANY($1::uuid[]) AND expires_at < clock_timestamp()
      AND (job.status = 'succeeded' OR NOT EXISTS (
          SELECT 1 FROM journal e JOIN job child ON child.id = e.child_id
          WHERE e.job_id = job.id AND e.kind = 'start' AND e.state = 'open'
            AND CASE WHEN child.finished_at IS NULL AND child.status <> 'cancel_requested' THEN true ELSE false END))
      AND NOT EXISTS (
          SELECT 1 FROM gate_job g JOIN gate ON gate.tenant_id = g.tenant_id AND gate.key = g.key
          WHERE g.job_id = job.id AND gate.per_minute IS NOT NULL
            AND (g.admitted_at > clock_timestamp() - interval '60 seconds' AND g.admitted_at < clock_timestamp() + interval '60 seconds'))
      AND NOT (job.notify AND job.expires_at > clock_timestamp() - interval '1 day')
    RETURNING id, tenant_id, pipeline, keep_seconds
)
INSERT INTO tombstone (job_id, tenant_id, pipeline, is_run, because)
SELECT d.id, d.tenant_id, d.pipeline, EXISTS (SELECT 1 FROM run r WHERE r.job_id = d.id),
       CASE WHEN d.keep_seconds = 0 THEN 'deleted' ELSE 'expired' END
FROM deleted d
ON CONFLICT (job_id) DO NOTHING
