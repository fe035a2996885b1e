-- forget_workers
WITH ended AS (
    DELETE FROM worker w
    WHERE w.seen_at < clock_timestamp() - $1::interval
      AND NOT EXISTS (SELECT 1 FROM task t WHERE t.status = 'running' AND t.lease_owner = w.id)
    RETURNING w.handlers, w.seen_at
)
INSERT INTO known_handler (name, seen_at)
SELECT h.name, max(ended.seen_at) FROM ended CROSS JOIN unnest(ended.handlers) AS h(name)
GROUP BY h.name ORDER BY h.name
ON CONFLICT (name) DO UPDATE SET seen_at = greatest(known_handler.seen_at, excluded.seen_at)
