-- expire_jobs_lock
SELECT j.id FROM job j
WHERE j.finished_at IS NULL AND j.deadline_at < statement_timestamp()
  AND ($2::uuid IS NULL OR j.id = $2) AND j.id <> ALL(ARRAY(SELECT q.unit::uuid FROM quarantine q WHERE q.duty = 'deadlines' AND q.retry_at > statement_timestamp()))
ORDER BY j.deadline_at LIMIT $1
FOR UPDATE SKIP LOCKED
