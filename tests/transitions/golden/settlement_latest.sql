-- settlement_latest
SELECT s.action, s.ref, s.actor, s.at FROM settlement s WHERE s.job_id = $1 AND s.tenant_id = $2
ORDER BY s.at DESC LIMIT 1
