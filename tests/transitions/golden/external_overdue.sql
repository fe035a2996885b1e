-- external_overdue
SELECT t.id, t.tenant_id, t.lease_owner, t.epoch, t.attempt FROM task t
WHERE t.status = 'running' AND starts_with(t.queue, 'ext:')
  AND t.started_at + make_interval(secs => t.timeout_seconds) < clock_timestamp() AND t.id <> ALL(ARRAY(SELECT q.unit::uuid FROM quarantine q WHERE q.duty = 'external_limits' AND q.retry_at > statement_timestamp()))
LIMIT $1
