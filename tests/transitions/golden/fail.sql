-- fail
WITH asked AS MATERIALIZED (
    -- The leases. `nth` is the lease's position in every parameter array, counted from 1.
    SELECT a.owner, a.id, a.epoch, a.nth FROM unnest($1::uuid[], $2::uuid[], $3::int[])
        WITH ORDINALITY AS a(owner, id, epoch, nth)
), jobs AS MATERIALIZED (
    -- Locks each job row and reads its columns once; later CTEs reuse them (see claims.marking). The job's leases
    -- are arrays: `owners`, `ids`, `epochs`, and `places` (their `nth`).
    SELECT j.id, j.status, j.steps_left, j.leased, j.external, j.tenant_id, j.trace, j.event_seq, j.pipeline,
           j.created_at, mine.owners, mine.ids, mine.epochs, mine.places
    FROM (
        SELECT t.job_id, array_agg(a.owner) AS owners, array_agg(a.id) AS ids, array_agg(a.epoch) AS epochs,
               array_agg(a.nth) AS places
        FROM asked a JOIN task t ON t.id = a.id GROUP BY t.job_id
    ) AS mine JOIN job j ON j.id = mine.job_id
    ORDER BY j.id
    FOR UPDATE OF j
), held AS MATERIALIZED (
    -- The tasks that pass the guard, locked.
    SELECT t.id, a.nth, jobs.status AS job_status, jobs.steps_left, jobs.leased, jobs.external, jobs.tenant_id,
           jobs.trace, jobs.event_seq, jobs.pipeline, jobs.created_at
    FROM jobs
    CROSS JOIN LATERAL unnest(jobs.owners, jobs.ids, jobs.epochs, jobs.places) AS a(owner, id, epoch, nth)
    JOIN task t ON t.id = a.id
    WHERE CASE WHEN t.lease_owner = a.owner AND t.epoch = a.epoch AND t.status = 'running' THEN true ELSE false END
      AND jobs.status <> 'cancel_requested'
    ORDER BY t.id
    FOR UPDATE OF t
), judged AS MATERIALIZED (
    -- `ends`: a failure of the job in this batch is final, and its job fails with it. Then all of them fail.
    SELECT one.*, bool_or(NOT one.again AND NOT one.contained) OVER (PARTITION BY one.job_id) AS ends
    FROM (
        SELECT t.id, t.job_id, t.contained, f.cause, f.code, f.message, f.delay, f.retryable,
               f.retryable AND CASE f.cause WHEN 'crash' THEN t.crashes + 1 < $9
                                            ELSE t.errors + 1 < t.max_attempts END AS again
        FROM held
        JOIN task t ON t.id = held.id
        JOIN unnest($4::text[], $5::text[], $6::text[], $7::bool[], $8::float8[])
            WITH ORDINALITY AS f(cause, code, message, retryable, delay, nth) ON f.nth = held.nth
    ) AS one
), failed AS (
    -- The guarded write. END_FAILED_JOBS reads this CTE.
    UPDATE task t
    SET status = CASE WHEN judged.again AND NOT judged.ends THEN 'retry' ELSE 'failed' END,
        lease_owner = NULL, lease_until = NULL,
        errors = t.errors + (judged.cause <> 'crash')::int,
        crashes = t.crashes + (judged.cause = 'crash')::int,
        available_at = clock_timestamp() + make_interval(secs => judged.delay),
        finished_at = CASE WHEN NOT judged.again OR judged.ends THEN clock_timestamp() END
    FROM judged WHERE t.id = judged.id
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, t.status, t.available_at, t.contained, t.unblocks,
              judged.ends, judged.code, judged.message, judged.cause, judged.retryable
), failures AS (
    INSERT INTO failure (task_id, epoch, cause, code, message, retryable)
    SELECT id, epoch, cause, code, message, retryable FROM failed
)
, rest AS (
    -- The other open steps of the jobs that fail.
    UPDATE task s
    SET status = CASE WHEN s.status = 'running' THEN 'cancelled' ELSE 'skipped' END,
        lease_owner = NULL, lease_until = NULL, finished_at = clock_timestamp()
    WHERE s.job_id IN (SELECT job_id FROM failed WHERE ends)
      AND s.id NOT IN (SELECT id FROM failed)
      AND s.status IN ('blocked', 'pending', 'running', 'retry', 'waiting')
    RETURNING s.id, s.job_id, s.step, s.position, s.epoch, s.status
), news AS (
    -- One event for each task, numbered within the job; the settled tasks come first.
    SELECT n.*, row_number() OVER (PARTITION BY job_id ORDER BY first, position) AS nth,
           count(*) OVER (PARTITION BY job_id) AS n
    FROM (
        SELECT 0 AS first, id, job_id, step, position, epoch, status, contained AND status = 'failed' AS given_up,
               jsonb_build_object('code', code, 'message', message, 'cause', cause,
                   'retry_at', CASE WHEN status <> 'failed' THEN available_at END) AS data
        FROM failed
        UNION ALL
        SELECT 1, id, job_id, step, position, epoch, status, false, NULL FROM rest
    ) AS n
), advanced AS (
    -- `ended`: the first failed step of a job that fails; its error becomes the job's.
    UPDATE job j
    SET status = CASE WHEN ended.code IS NULL THEN j.status ELSE 'failed' END,
        error = CASE WHEN ended.code IS NULL THEN j.error
                     ELSE jsonb_build_object('code', ended.code, 'message', ended.message, 'step', ended.step,
                                             'retryable', ended.retryable) END,
        finished_at = CASE WHEN ended.code IS NOT NULL THEN clock_timestamp() END,
        expires_at = CASE WHEN ended.code IS NOT NULL
                          THEN clock_timestamp() + make_interval(secs => j.keep_seconds) END,
        leased = CASE WHEN ended.code IS NULL THEN j.leased - mine.settled ELSE 0 END,
        steps_left = j.steps_left - mine.given_up,
        event_seq = j.event_seq + mine.n
    FROM (
        SELECT job_id, count(*)::int AS n, (count(*) FILTER (WHERE first = 0))::int AS settled,
               (count(*) FILTER (WHERE given_up))::int AS given_up
        FROM news GROUP BY job_id
    ) AS mine
    LEFT JOIN (
        SELECT DISTINCT ON (job_id) job_id, code, message, step, retryable FROM failed
        WHERE ends ORDER BY job_id, contained, position
    ) AS ended ON ended.job_id = mine.job_id
    WHERE j.id = mine.job_id
    RETURNING j.id, j.tenant_id, j.status, j.trace, j.event_seq - mine.n AS seq, j.pipeline,
              CASE WHEN ended.retryable THEN 'failed' ELSE 'rejected' END AS outcome,
              extract(epoch FROM clock_timestamp() - j.created_at)::float8 AS seconds
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT n.job_id, a.seq + n.nth, a.tenant_id,
           CASE n.status WHEN 'retry' THEN 'retried' WHEN 'pending' THEN 'lost' ELSE n.status END,
           CASE WHEN a.status = 'failed' AND n.nth < n.n THEN 'running' ELSE a.status END,
           n.id, n.step, n.status, n.epoch, n.data
    FROM news n JOIN advanced a ON a.id = n.job_id
), woken AS (
    -- The workflows whose steps gave up: an end like any other (settlements/completion.py).
    UPDATE task w
    SET news = w.news + gone.n, wake_at = CASE WHEN w.news + gone.n < w.wake_at THEN w.wake_at END,
        available_at = CASE WHEN w.status = 'waiting' AND w.news + gone.n >= w.wake_at THEN clock_timestamp()
                            ELSE w.available_at END
    FROM (
        SELECT parent, count(*)::int AS n FROM failed, unnest(failed.unblocks) AS parent
        WHERE contained AND status = 'failed' AND NOT ends GROUP BY parent
    ) AS gone
    WHERE w.id = gone.parent AND w.id NOT IN (SELECT id FROM failed)
      AND CASE WHEN (w.status = 'waiting' AND w.wake_at IS NOT NULL) OR w.status = 'running' THEN true ELSE false END
    RETURNING w.id, w.job_id, w.queue, w.priority, w.status, w.wake_at
), woken_hints AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT w.id, w.job_id, w.queue, w.priority, a.trace, clock_timestamp() + interval '1 second'
    FROM woken w JOIN advanced a ON a.id = w.job_id
    WHERE w.status = 'waiting' AND w.wake_at IS NULL
    RETURNING id, task_id, queue, priority, headers
)
SELECT a.id AS task_id, f.status AS state,
       coalesce(f.id IS NOT NULL OR (t.epoch = a.epoch AND t.status IN ('retry', 'failed')), false) AS settled,
       e.id AS ended_job, e.pipeline, e.outcome, e.seconds,
       NULL::bigint AS outbox_id, NULL::text AS queue, NULL::int AS priority, NULL::jsonb AS headers
FROM asked a LEFT JOIN failed f ON f.id = a.id LEFT JOIN task t ON t.id = a.id
LEFT JOIN advanced e ON e.id = f.job_id AND e.status = 'failed'
UNION ALL
SELECT h.task_id, NULL, NULL, NULL, NULL, NULL, NULL, h.id, h.queue, h.priority, h.headers FROM woken_hints h
