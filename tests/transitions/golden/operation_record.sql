-- operation_record
INSERT INTO operation_refusal (operation_id, job_id, tenant_id, code, detail)
SELECT $1, r.job_id, $2, r.code, r.detail FROM unnest($3::uuid[], $4::text[], $5::text[]) AS r(job_id, code, detail)
ON CONFLICT (operation_id, job_id) DO NOTHING
