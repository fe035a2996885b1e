-- limits_withdraw
UPDATE gate SET declared = false, at_most = general.at_most, per_minute = general.per_minute
FROM (SELECT max(at_most) AS at_most, max(per_minute) AS per_minute FROM gate
      WHERE tenant_id = '*' AND key = 'tenant' AND declared
        AND $1 <> '*' AND $2 = 'tenant') AS general
WHERE gate.tenant_id = $1 AND gate.key = $2 AND gate.declared
RETURNING true
