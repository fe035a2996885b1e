-- workflow_children_close
UPDATE journal e
SET state = 'done', value = CASE WHEN e.kind = 'start' AND child.status = 'failed' THEN '{"closed": true}'::jsonb ELSE e.value END
FROM job child, job parent
WHERE e.kind IN ('start', 'result') AND e.state = 'open' AND child.id = e.child_id AND parent.id = e.job_id
  AND CASE WHEN parent.status = 'succeeded' THEN true
           WHEN child.finished_at IS NULL THEN false
           WHEN parent.status = 'failed' THEN EXISTS (
               SELECT FROM job p WHERE p.id = e.job_id AND CASE WHEN p.status = 'failed' THEN true ELSE false END FOR SHARE SKIP LOCKED)
           ELSE parent.finished_at IS NOT NULL OR (e.kind = 'start' AND child.status <> 'failed') END
