-- limits_follow
UPDATE gate SET at_most = $3, per_minute = $4
FROM (SELECT tenant_id, key FROM gate
      WHERE NOT declared AND CASE WHEN $1 = '*' AND $2 = 'tenant' THEN key = 'tenant'
                                  ELSE tenant_id = $1 AND left(key, -41) = $2 END
      ORDER BY tenant_id COLLATE "C", key COLLATE "C" FOR NO KEY UPDATE) AS follower
WHERE gate.tenant_id = follower.tenant_id AND gate.key = follower.key
RETURNING gate.tenant_id, gate.key
