-- external_needed
SELECT c.id AS task_id, p.step, r.value,
       (SELECT jsonb_agg(jsonb_build_object('name', o.name, 'key', o.key, 'size', o.size, 'sha256', o.sha256,
                                            'content_type', o.content_type) ORDER BY o.name)
        FROM output o WHERE o.task_id = p.id) AS files
FROM task c JOIN task p ON p.job_id = c.job_id AND c.id = ANY(p.unblocks) AND p.status = 'succeeded'
LEFT JOIN result r ON r.task_id = p.id
WHERE c.id = ANY($1::uuid[])
ORDER BY p.position
