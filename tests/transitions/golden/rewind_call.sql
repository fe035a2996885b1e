-- rewind_call
WITH called AS (
    SELECT e.child_id FROM journal e
    WHERE e.job_id = $1 AND e.kind = 'start' AND strpos(e.name, '#') > 0 AND e.branch || e.name = $2
), forgotten AS (
    DELETE FROM journal e USING called LEFT JOIN job child ON child.id = called.child_id
    WHERE e.job_id = $1 AND e.child_id = called.child_id
      AND NOT coalesce(CASE WHEN child.finished_at IS NULL THEN true ELSE false END AND child.status <> 'cancel_requested', false)
      AND (e.kind = 'result' OR (e.kind = 'start' AND child.status IS DISTINCT FROM 'failed'))
)
SELECT EXISTS (SELECT FROM called)
