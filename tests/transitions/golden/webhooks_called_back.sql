-- webhooks_called_back
UPDATE job_callback c SET delivery_id = n.delivery_id
FROM unnest($1::uuid[], $2::uuid[]) AS n(job_id, delivery_id)
WHERE c.job_id = n.job_id
