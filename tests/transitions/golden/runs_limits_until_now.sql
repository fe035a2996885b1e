-- runs_limits_until_now
SELECT DISTINCT g.tenant_id, g.key
FROM jsonb_to_recordset($2::jsonb) AS a(pipeline text, key text)
JOIN job j ON j.tenant_id = $1 AND j.pipeline = a.pipeline AND j.dedupe_key = a.key
JOIN gate_job g ON g.job_id = j.id
WHERE CASE WHEN j.finished_at IS NULL THEN true ELSE false END
