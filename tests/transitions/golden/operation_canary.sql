-- operation_canary
SELECT count(*) FILTER (WHERE j.finished_at IS NULL) AS unfinished,
       count(*) FILTER (WHERE j.finished_at IS NOT NULL AND j.status <> 'succeeded') AS unsuccessful
FROM job j WHERE j.id = ANY($1::uuid[]) AND ($2::text IS NULL OR j.tenant_id = $2)
