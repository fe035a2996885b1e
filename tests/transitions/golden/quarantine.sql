-- quarantine
INSERT INTO quarantine AS q (duty, unit, failures, error, failed_at, retry_at)
VALUES ($1, $2, 1, $3, statement_timestamp(), statement_timestamp() + make_interval(secs => ($4::int[])[1]))
ON CONFLICT (duty, unit) DO UPDATE
SET failures = CASE WHEN q.retry_at < statement_timestamp() - $5::interval THEN 1 ELSE q.failures + 1 END,
    error = excluded.error, failed_at = excluded.failed_at,
    retry_at = excluded.failed_at + make_interval(secs => ($4::int[])[
        CASE WHEN q.retry_at < statement_timestamp() - $5::interval THEN 1
             ELSE least(q.failures + 1, cardinality($4::int[])) END])
RETURNING failures
