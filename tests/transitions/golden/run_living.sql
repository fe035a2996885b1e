-- run_living
SELECT dedupe_key, id, status, pipeline_version AS version FROM job
WHERE tenant_id = $1 AND pipeline = $2 AND dedupe_key = ANY($3::text[]) AND dedupe_key IS NOT NULL
  AND finished_at IS NULL
