-- debounce_lock
SELECT pg_advisory_xact_lock(hashed.key) FROM (
    SELECT DISTINCT hashtextextended($1::text || '/' || a.pipeline || '/' || a.key, 0) AS key
    FROM jsonb_to_recordset($2::jsonb) AS a(pipeline text, key text) ORDER BY 1
) AS hashed
