-- webhooks_watch
WITH unwatched AS MATERIALIZED (
    SELECT j.id FROM job j
    WHERE j.tenant_id = $1 AND j.finished_at IS NULL AND j.id > $2 AND NOT j.notify
      AND NOT (j.pipeline = ANY($4::text[]) AND NOT EXISTS (SELECT 1 FROM run r WHERE r.job_id = j.id))
    ORDER BY j.id LIMIT $3 FOR UPDATE OF j
), watched AS (
    UPDATE job j SET notify = true FROM unwatched WHERE j.id = unwatched.id
)
SELECT id FROM unwatched ORDER BY id DESC LIMIT 1
