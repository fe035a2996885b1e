-- time_travel_expiries
UPDATE job SET params = jsonb_set(params, '{expires}', to_jsonb((params ->> 'expires')::timestamptz - $1::interval))
WHERE pipeline = ANY($2::text[]) AND params ->> 'expires' IS NOT NULL
