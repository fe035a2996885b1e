-- time_travel_end_leases
WITH leaders AS (DELETE FROM leadership)
UPDATE task SET lease_until = clock_timestamp() - interval '1 hour' WHERE status = 'running'
