-- resolve_record
INSERT INTO result (task_id, value) VALUES ($1, $2) ON CONFLICT (task_id) DO UPDATE SET value = excluded.value
