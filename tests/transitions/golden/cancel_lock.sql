-- cancel_lock
SELECT j.id FROM job j
WHERE j.id = ANY($1::uuid[]) AND j.tenant_id = $2 AND j.status <> 'cancel_requested' AND (j.cancelable OR $3)
  AND CASE WHEN j.finished_at IS NULL THEN true ELSE false END
ORDER BY j.id
FOR UPDATE
