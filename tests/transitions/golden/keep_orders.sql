-- keep_orders
UPDATE job w
SET params = w.params || jsonb_build_object('order',
    jsonb_build_object('params', j.params - $2::text[], 'ref', r.value ->> 'ref'))
FROM job j JOIN task t ON t.job_id = j.id AND t.step = $4 JOIN result r ON r.task_id = t.id
WHERE j.id = ANY($1::uuid[]) AND j.expires_at < clock_timestamp() AND j.pipeline = $3
  AND r.value ? 'ref'
  AND w.tenant_id = j.tenant_id AND w.pipeline = $5 AND w.exclusive_key = j.id::text
  AND w.finished_at IS NULL
