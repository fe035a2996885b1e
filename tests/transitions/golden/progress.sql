-- progress
INSERT INTO progress (task_id, job_id, epoch, percent, summary)
SELECT t.id, t.job_id, t.epoch, p.percent, p.summary
FROM unnest($1::uuid[], $2::uuid[], $3::int[], $4::float8[], $5::text[]) AS p(owner, id, epoch, percent, summary)
JOIN task t ON t.id = p.id AND t.lease_owner = p.owner AND t.epoch = p.epoch AND CASE WHEN t.status = 'running' THEN true ELSE false END
ON CONFLICT (task_id) DO UPDATE
SET epoch = excluded.epoch, percent = excluded.percent, summary = excluded.summary, at = clock_timestamp()
WHERE progress.epoch <= excluded.epoch
RETURNING task_id
