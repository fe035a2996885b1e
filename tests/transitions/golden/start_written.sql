-- start_written
SELECT EXISTS (SELECT FROM journal e WHERE e.job_id = $1 AND e.branch = $2 AND e.number = $3)
