-- quarantine
INSERT INTO quarantine AS q (duty, unit, failures, error, retry_at)
VALUES ($1, $2, 1, $3, clock_timestamp() + make_interval(secs => ($4::int[])[1]))
ON CONFLICT (duty, unit) DO UPDATE
SET failures = CASE WHEN q.retry_at < clock_timestamp() - $5::interval THEN 1 ELSE q.failures + 1 END,
    error = excluded.error, failed_at = clock_timestamp(),
    retry_at = clock_timestamp() + make_interval(secs => ($4::int[])[
        CASE WHEN q.retry_at < clock_timestamp() - $5::interval THEN 1
             ELSE least(q.failures + 1, cardinality($4::int[])) END])
RETURNING failures
