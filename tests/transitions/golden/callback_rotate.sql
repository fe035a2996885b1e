-- callback_rotate
INSERT INTO callback_secret AS old (tenant_id, secrets) VALUES ($1, ARRAY[$2::bytea])
ON CONFLICT (tenant_id) DO UPDATE
SET secrets = (array_prepend($2::bytea, old.secrets))[1:2], created_at = clock_timestamp()
RETURNING secrets, created_at
