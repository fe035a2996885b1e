-- gates_still_waiting
SELECT j.id FROM job j WHERE j.id = ANY($1::uuid[]) AND j.held AND CASE WHEN j.finished_at IS NULL THEN true ELSE false END
