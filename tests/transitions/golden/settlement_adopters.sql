-- settlement_adopters
SELECT j.params FROM settlement s JOIN job j ON j.id = s.job_id
WHERE s.ref = $3 AND s.system = $2 AND s.tenant_id <> $1
