-- expire_early
UPDATE job
SET keep_seconds = 0, expires_at = CASE WHEN finished_at IS NOT NULL THEN clock_timestamp() END
WHERE id = $1 AND tenant_id = $2
RETURNING finished_at IS NOT NULL AS finished, output_prefix
