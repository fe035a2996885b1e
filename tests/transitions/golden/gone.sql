-- gone
SELECT w.id FROM worker w
WHERE w.present AND NOT EXISTS (
    SELECT 1 FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.classid = 7305::oid AND l.objid = w.presence_key::oid)
  AND (w.incarnation = greatest(pg_postmaster_start_time(), (SELECT stats_reset FROM pg_stat_bgwriter))
       OR (w.incarnation IS NULL AND greatest(pg_postmaster_start_time(), (SELECT stats_reset FROM pg_stat_bgwriter)) < clock_timestamp() - interval '10 seconds'))
