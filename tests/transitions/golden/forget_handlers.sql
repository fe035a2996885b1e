-- forget_handlers
DELETE FROM known_handler k
WHERE k.seen_at < clock_timestamp() - $1::interval
   OR k.name IN (SELECT o.name FROM known_handler o ORDER BY o.seen_at DESC, o.name OFFSET $2)
