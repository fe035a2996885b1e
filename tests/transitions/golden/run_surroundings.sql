-- run_surroundings
SELECT asked.tenant_id,
       EXISTS (SELECT 1 FROM webhook w WHERE w.tenant_id = asked.tenant_id AND w.enabled) AS watched,
       (SELECT coalesce(jsonb_agg(g), '[]')
        FROM (SELECT tenant_id, key, at_most, per_minute FROM gate
              WHERE declared AND tenant_id IN (asked.tenant_id, $2)) AS g) AS limits
FROM unnest($1::text[]) AS asked(tenant_id)
