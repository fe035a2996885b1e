-- workflow_orphans
SELECT child.id, child.tenant_id, parent.id AS parent_id, parent.status
FROM journal e
JOIN job child ON child.id = e.child_id AND child.finished_at IS NULL AND child.status <> 'cancel_requested'
JOIN job parent ON parent.id = e.job_id
WHERE e.kind = 'start' AND e.state = 'open'
  AND parent.status IN ('cancel_requested', 'cancelled', 'failed', 'expired') AND child.id <> ALL(ARRAY(SELECT q.unit::uuid FROM quarantine q WHERE q.duty = 'workflow_orphans' AND q.retry_at > statement_timestamp()))
LIMIT $1
