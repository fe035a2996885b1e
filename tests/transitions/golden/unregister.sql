-- unregister
WITH ended AS (DELETE FROM worker WHERE id = $1 RETURNING handlers, clock_timestamp() AS seen_at)
INSERT INTO known_handler (name, seen_at)
SELECT h.name, max(ended.seen_at) FROM ended CROSS JOIN unnest(ended.handlers) AS h(name)
GROUP BY h.name ORDER BY h.name
ON CONFLICT (name) DO UPDATE SET seen_at = greatest(known_handler.seen_at, excluded.seen_at)
