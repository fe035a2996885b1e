-- gates_inside
SELECT gate.tenant_id, gate.key, used.unfinished, used.last_minute
FROM unnest($1::text[], $2::text[]) AS limits(tenant_id, key)
JOIN gate ON gate.tenant_id = limits.tenant_id AND gate.key = limits.key
CROSS JOIN LATERAL (
    SELECT count(*) AS unfinished, 0::bigint AS last_minute FROM gate_job g
    WHERE gate.per_minute IS NULL AND g.tenant_id = gate.tenant_id AND g.key = gate.key AND g.admitted_at IS NOT NULL
    HAVING gate.per_minute IS NULL
    UNION ALL
    SELECT count(*) FILTER (WHERE j.finished_at IS NULL),
           count(*) FILTER (WHERE (g.admitted_at > clock_timestamp() - interval '60 seconds' AND g.admitted_at < clock_timestamp() + interval '60 seconds'))
    FROM gate_job g JOIN job j ON j.id = g.job_id
    WHERE gate.per_minute IS NOT NULL AND g.tenant_id = gate.tenant_id AND g.key = gate.key
      AND g.admitted_at IS NOT NULL
    HAVING gate.per_minute IS NOT NULL
) AS used
