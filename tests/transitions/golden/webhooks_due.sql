-- webhooks_due
SELECT j.id, j.tenant_id, j.status, j.error, j.finished_at, j.pipeline, r.template, r.version, r.scope, r.scope_id,
       CASE WHEN j.pipeline = ANY($4::text[]) AND j.error IS NOT NULL THEN j.params END AS params,
       (SELECT jsonb_object_agg(g.name, g.value) FROM job_tag g WHERE g.job_id = j.id) AS tags,
       (SELECT c.url FROM job_callback c WHERE c.job_id = j.id AND c.tenant_id = j.tenant_id) AS callback_url
FROM job j LEFT JOIN run r ON r.job_id = j.id
WHERE j.notify AND j.finished_at IS NOT NULL
  AND ($3::text[] IS NULL OR j.error IS NULL OR position('.' IN j.pipeline) = 0 OR j.pipeline = ANY($3)
       OR (($5 OR j.expires_at < clock_timestamp()) AND NOT (EXISTS (
           SELECT 1 FROM worker w WHERE w.handlers IS NULL
           OR EXISTS (SELECT 1 FROM unnest(w.handlers) AS h(name) WHERE starts_with(h.name, j.pipeline || '.')))
         OR EXISTS (SELECT 1 FROM known_handler k WHERE starts_with(k.name, j.pipeline || '.'))))
       OR j.expires_at < clock_timestamp() - interval '12 hours')
  AND CASE WHEN $2::uuid IS NULL THEN j.id <> ALL(ARRAY(SELECT q.unit::uuid FROM quarantine q WHERE q.duty = 'webhooks' AND q.retry_at > statement_timestamp())) ELSE j.id = $2 END
ORDER BY j.finished_at LIMIT $1
FOR UPDATE OF j SKIP LOCKED
