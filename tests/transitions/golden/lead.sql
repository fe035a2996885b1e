-- lead
WITH dead AS MATERIALIZED (
-- gone
SELECT w.id FROM worker w
WHERE w.present AND NOT EXISTS (
    SELECT 1 FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.classid = 7305::oid AND l.objid = w.presence_key::oid)
  AND (w.incarnation = greatest(pg_postmaster_start_time(), (SELECT stats_reset FROM pg_stat_bgwriter))
       OR (w.incarnation IS NULL AND greatest(pg_postmaster_start_time(), (SELECT stats_reset FROM pg_stat_bgwriter)) < clock_timestamp() - interval '10 seconds'))
)
INSERT INTO leadership (role, owner, until)
SELECT $1, $2, clock_timestamp() + $3::interval
WHERE NOT EXISTS (
    SELECT 1 FROM leadership l
    WHERE l.role = $1 AND l.owner <> $2 AND l.until >= clock_timestamp() AND l.owner NOT IN (SELECT id FROM dead)
)
ON CONFLICT (role) DO UPDATE SET owner = excluded.owner, until = excluded.until
WHERE leadership.owner = excluded.owner OR leadership.until < clock_timestamp()
   OR leadership.owner IN (SELECT id FROM dead)
RETURNING true
