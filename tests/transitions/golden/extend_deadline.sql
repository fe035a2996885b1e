-- extend_deadline
UPDATE job SET deadline_at = greatest(deadline_at, clock_timestamp() + $2::interval)
WHERE id = $1 AND deadline_at IS NOT NULL AND finished_at IS NULL
