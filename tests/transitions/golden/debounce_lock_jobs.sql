-- debounce_lock_jobs
SELECT pg_advisory_xact_lock(hashed.key) FROM (
    SELECT DISTINCT hashtextextended($1::text || '/' || a.pipeline || '/' || a.key, 0) AS key
    FROM (
        SELECT j.pipeline, j.dedupe_key AS key FROM job j
        WHERE j.id = ANY($2::uuid[]) AND j.tenant_id = $1 AND j.dedupe_key IS NOT NULL
    ) AS a ORDER BY 1
) AS hashed
