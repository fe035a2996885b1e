-- debounce_written_earlier
SELECT a.nth, coalesce(j.id, convert_from(i.body, 'UTF8')::uuid) AS run_id
FROM jsonb_to_recordset($2::jsonb) AS a(id uuid, pipeline text, nth int)
LEFT JOIN job j ON j.id = a.id AND j.tenant_id = $1 AND j.pipeline = a.pipeline
LEFT JOIN idempotency i ON i.tenant_id = $1 AND i.key = ' debounced ' || a.id::text AND i.expires_at > clock_timestamp()
WHERE j.id IS NOT NULL OR i.key IS NOT NULL
