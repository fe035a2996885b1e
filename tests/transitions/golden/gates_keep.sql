-- gates_keep
SELECT g.tenant_id, g.key
FROM unnest($1::text[], $2::text[], $3::int[], $4::int[]) AS brought(tenant_id, key, at_most, per_minute)
JOIN gate g ON g.tenant_id = brought.tenant_id AND g.key = brought.key
WHERE g.declared OR (brought.at_most IS NULL AND brought.per_minute IS NULL)
   OR (g.at_most, g.per_minute) IS NOT DISTINCT FROM (brought.at_most, brought.per_minute)
ORDER BY g.tenant_id COLLATE "C", g.key COLLATE "C"
FOR KEY SHARE OF g
