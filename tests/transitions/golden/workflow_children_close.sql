-- workflow_children_close
WITH closable AS (
    SELECT e.job_id, e.branch, e.number, e.kind = 'start' AND parent.status = 'failed' AS is_marked
    FROM journal e
    LEFT JOIN LATERAL (
        SELECT j.finished_at IS NULL AS goes_on FROM job j WHERE j.id = e.child_id OFFSET 0) AS child ON true
    CROSS JOIN LATERAL (SELECT j.status, j.finished_at FROM job j WHERE j.id = e.job_id OFFSET 0) AS parent
    WHERE e.kind IN ('start', 'result') AND e.state = 'open'
      AND CASE WHEN parent.status = 'succeeded' THEN true
               WHEN child.goes_on THEN false
               WHEN parent.status = 'failed' THEN EXISTS (
                   SELECT FROM job p WHERE p.id = e.job_id AND CASE WHEN p.status = 'failed' THEN true ELSE false END FOR SHARE SKIP LOCKED)
               WHEN parent.finished_at IS NOT NULL THEN true
               ELSE e.kind = 'start' AND child.goes_on IS NULL END
    LIMIT $1 FOR NO KEY UPDATE OF e
)
UPDATE journal e SET state = 'done', value = CASE WHEN c.is_marked THEN '{"closed": true}'::jsonb ELSE e.value END
FROM closable c WHERE e.job_id = c.job_id AND e.branch = c.branch AND e.number = c.number
