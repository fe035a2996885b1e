-- gates_waiting
WITH RECURSIVE limits AS (
    SELECT * FROM unnest($1::text[], $2::text[]) AS a(tenant_id, key)
), owners(tenant_id, key, owner) AS (
    -- The tenants that wait at each limit, by a loose index scan: one probe for each tenant, however many jobs it has.
    SELECT limits.tenant_id, limits.key, first.owner
    FROM limits CROSS JOIN LATERAL (
        SELECT g.owner FROM gate_job g
        WHERE g.tenant_id = limits.tenant_id AND g.key = limits.key AND g.admitted_at IS NULL
        ORDER BY g.owner LIMIT 1
    ) AS first
    UNION ALL
    SELECT o.tenant_id, o.key, next.owner
    FROM owners o CROSS JOIN LATERAL (
        SELECT g.owner FROM gate_job g
        WHERE g.tenant_id = o.tenant_id AND g.key = o.key AND g.admitted_at IS NULL AND g.owner > o.owner
        ORDER BY g.owner LIMIT 1
    ) AS next
), heads AS MATERIALIZED (
    -- The first jobs of each tenant, with their turn. At a limit that all tenants share, the turn also counts the
    -- tenant's admitted jobs.
    SELECT head.job_id, head.priority, head.ready_at, head.nth + admitted.job_count AS turn
    FROM owners o
    CROSS JOIN LATERAL (
        SELECT count(*) AS job_count FROM gate_job i
        WHERE o.tenant_id = $4 AND i.tenant_id = o.tenant_id AND i.key = o.key AND i.owner = o.owner
          AND i.admitted_at IS NOT NULL
    ) AS admitted
    CROSS JOIN LATERAL (
        SELECT first.*, row_number() OVER (ORDER BY first.priority, first.ready_at, first.job_id) AS nth
        FROM generate_series(0, 2) AS band CROSS JOIN LATERAL (
            SELECT g.job_id, g.priority, g.ready_at FROM gate_job g
            WHERE g.tenant_id = o.tenant_id AND g.key = o.key AND g.owner = o.owner AND g.priority = band
              AND g.admitted_at IS NULL AND g.ready_at <= statement_timestamp()
              AND ($5::uuid IS NULL OR g.job_id = $5) AND g.job_id <> ALL(ARRAY(SELECT q.unit::uuid FROM quarantine q WHERE q.duty = 'admissions' AND q.retry_at > statement_timestamp()))
            ORDER BY g.ready_at, g.job_id LIMIT $3
        ) AS first
        ORDER BY first.priority, first.ready_at, first.job_id LIMIT $3
    ) AS head
), waiting AS MATERIALIZED (
    SELECT job_id, priority, min(ready_at) AS ready_at, max(turn) AS turn FROM heads GROUP BY job_id, priority
    ORDER BY turn, priority, ready_at, job_id LIMIT $3
)
SELECT w.job_id, j.tenant_id, array_agg(g.tenant_id) AS tenants, array_agg(g.key) AS keys
FROM waiting w JOIN gate_job g ON g.job_id = w.job_id JOIN job j ON j.id = w.job_id
GROUP BY w.job_id, w.priority, w.ready_at, w.turn, j.tenant_id ORDER BY w.turn, w.priority, w.ready_at, w.job_id
