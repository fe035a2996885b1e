-- runs_held
SELECT j.id, j.priority, max(t.available_at) AS starts_at FROM job j JOIN task t ON t.job_id = j.id
WHERE j.id = ANY($1::uuid[]) AND j.held GROUP BY j.id, j.priority
