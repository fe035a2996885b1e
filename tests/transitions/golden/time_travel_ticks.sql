-- time_travel_ticks
UPDATE schedule SET next_run_at = greatest(next_run_at - $1::interval, least(next_run_at, clock_timestamp()))
WHERE next_run_at IS NOT NULL
