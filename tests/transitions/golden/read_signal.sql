-- read_signal
SELECT s.id, s.name, s.payload, s.at
FROM task t JOIN signal s ON s.job_id = t.job_id
WHERE t.id = $2 AND t.lease_owner = $1 AND t.epoch = $3 AND CASE WHEN t.status = 'running' THEN true ELSE false END
  AND s.name = $4 AND s.id > $5
ORDER BY s.id LIMIT 1
