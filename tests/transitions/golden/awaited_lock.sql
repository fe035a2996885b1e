-- awaited_lock
SELECT j.id FROM (
    SELECT DISTINCT e.job_id FROM journal e JOIN job parent ON parent.id = e.job_id
    WHERE e.kind = 'result' AND e.state = 'open'
      AND NOT EXISTS (SELECT 1 FROM job child WHERE child.id = e.child_id AND CASE WHEN child.finished_at IS NULL THEN true ELSE false END)
      AND e.due_at IS DISTINCT FROM coalesce((SELECT child.finished_at FROM job child WHERE child.id = e.child_id), 'epoch')
      AND CASE WHEN parent.finished_at IS NULL THEN true ELSE false END
      AND EXISTS (SELECT 1 FROM task t WHERE t.job_id = e.job_id AND NOT t.contained AND t.journaled AND t.available_at > clock_timestamp()
      AND CASE WHEN t.status = 'waiting' THEN true ELSE false END)
      AND ($2::uuid IS NULL OR e.job_id = $2) AND e.job_id <> ALL(ARRAY(SELECT q.unit::uuid FROM quarantine q WHERE q.duty = 'workflow_children' AND q.retry_at > statement_timestamp()))
) AS workflow JOIN job j ON j.id = workflow.job_id
LIMIT $1
FOR UPDATE OF j SKIP LOCKED
