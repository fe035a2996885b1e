-- gates_known
INSERT INTO gate (tenant_id, key, at_most, per_minute)
SELECT * FROM unnest($1::text[], $2::text[], $3::int[], $4::int[])
ON CONFLICT (tenant_id, key) DO UPDATE SET at_most = excluded.at_most, per_minute = excluded.per_minute
WHERE NOT gate.declared AND (excluded.at_most IS NOT NULL OR excluded.per_minute IS NOT NULL)
  AND (gate.at_most, gate.per_minute) IS DISTINCT FROM (excluded.at_most, excluded.per_minute)
