-- read_open_calls
SELECT a.nth, t.news, coalesce(j.started_at, j.created_at) AS started_at, j.pipeline_version AS version,
    clock_timestamp() AS read_at,
    CASE WHEN j.status = 'cancel_requested' THEN (j.cancel ->> 'at')::timestamptz END AS cancelled_at,
    first_signals.signals, first_signals.has_more AS has_more_signals,
    NOT t.journaled AND EXISTS (SELECT 1 FROM task o WHERE o.job_id = t.job_id AND NOT o.contained AND o.journaled)
        AS is_of_other_step,
    (
    SELECT coalesce(jsonb_agg(jsonb_build_array(
        e.branch, e.number, e.kind, e.name, e.state, coalesce(e.value, r.value), e.child_id,
        coalesce(step.status, child.status), coalesce(f.code, child.error ->> 'code'),
        coalesce(f.message, child.error ->> 'message', child.cancel ->> 'reason'),
        CASE WHEN e.kind <> 'result' AND e.due_at IS NOT NULL
             THEN greatest(extract(epoch FROM e.due_at - clock_timestamp()), 0)::float8 END,
        coalesce(step.finished_at, child.finished_at, CASE WHEN e.kind IN ('sleep', 'signal') THEN e.due_at END, e.at))
        ORDER BY e.branch, e.number), '[]')
    FROM jsonb_array_elements(($4::jsonb[])[a.nth] -> 'of') AS p(place) CROSS JOIN LATERAL (SELECT * FROM journal x WHERE x.job_id = t.job_id AND x.branch = p.place ->> 0 AND x.number = (p.place ->> 1)::int LIMIT 1) AS e
    LEFT JOIN LATERAL (SELECT * FROM task s WHERE e.kind = 'run' AND s.id = e.child_id LIMIT 1) AS step ON true
    LEFT JOIN LATERAL (
        SELECT * FROM job c WHERE e.kind = 'result' AND c.id = e.child_id AND CASE WHEN c.tenant_id = t.tenant_id THEN true ELSE false END LIMIT 1
    ) AS child ON true
    LEFT JOIN LATERAL (
        SELECT r.value FROM result r
        WHERE r.task_id = CASE WHEN step.status = 'succeeded' THEN step.id WHEN child.status = 'succeeded'
            THEN (SELECT o.id FROM task o WHERE o.job_id = child.id AND NOT o.contained) END
        LIMIT 1) AS r ON true
    LEFT JOIN LATERAL (
        SELECT f.code, f.message FROM failure f
        WHERE f.task_id = step.id AND step.status = 'failed' ORDER BY f.epoch DESC LIMIT 1) AS f ON true) AS entries
FROM unnest($1::uuid[], $2::uuid[], $3::int[]) WITH ORDINALITY AS a(owner, id, epoch, nth)
JOIN task t ON t.id = a.id JOIN job j ON j.id = t.job_id
CROSS JOIN LATERAL (
    SELECT coalesce(jsonb_agg(jsonb_build_object('id', s.id, 'name', s.name, 'payload', s.payload, 'at', s.at)
                              ORDER BY s.id) FILTER (WHERE s.is_read), '[]') AS signals,
           coalesce(bool_or(NOT s.is_read), false) AS has_more
    FROM (
        SELECT x.*, row_number() OVER earlier <= 16
                    AND sum(x.bytes) OVER earlier - x.bytes < 65536 AS is_read
        FROM (SELECT y.*, octet_length(y.payload::text) AS bytes FROM signal y WHERE y.job_id = t.job_id
              ORDER BY y.id LIMIT 17) AS x
        WINDOW earlier AS (ORDER BY x.id)
    ) AS s) AS first_signals
WHERE t.lease_owner = a.owner AND t.epoch = a.epoch AND CASE WHEN t.status = 'running' THEN true ELSE false END
