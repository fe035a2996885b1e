-- run_surroundings
SELECT tenant.id AS tenant_id,
       EXISTS (SELECT 1 FROM webhook w WHERE w.tenant_id = tenant.id AND w.enabled) AS watched,
       (SELECT coalesce(jsonb_agg(g), '[]')
        FROM (SELECT tenant_id, key, at_most, per_minute FROM gate
              WHERE declared AND tenant_id IN (tenant.id, $2)) AS g) AS limits
FROM unnest($1::text[]) AS tenant(id)
