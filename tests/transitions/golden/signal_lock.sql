-- signal_lock
SELECT j.finished_at IS NOT NULL AS ended, j.status = 'cancel_requested' AS cancelling FROM job j
WHERE j.id = $1 AND j.tenant_id = $2
FOR UPDATE
