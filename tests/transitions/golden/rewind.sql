-- rewind
WITH RECURSIVE again(id) AS (
    -- The step, and all steps after it.
    SELECT t.id FROM task t WHERE t.job_id = $1 AND t.step = $2 AND NOT (t.status = 'skipped' AND t.epoch = 0
    AND NOT EXISTS (SELECT 1 FROM history e WHERE e.job_id = t.job_id AND e.task_id = t.id))
    UNION
    SELECT t.id FROM again JOIN task p ON p.id = again.id JOIN task t ON t.id = ANY(p.unblocks)
    WHERE NOT (t.status = 'skipped' AND t.epoch = 0
    AND NOT EXISTS (SELECT 1 FROM history e WHERE e.job_id = t.job_id AND e.task_id = t.id))
), parts(id) AS (
    -- The parts of a step that fans out again, and the parts of these parts. The table `item` names the parent of each
    -- part. A step whose part runs again keeps its parts.
    SELECT i.task_id FROM again JOIN item i ON i.parent_id = again.id JOIN task t ON t.id = i.task_id
    WHERE NOT t.contained
      AND NOT EXISTS (SELECT 1 FROM item other JOIN again a ON a.id = other.task_id WHERE other.parent_id = i.parent_id)
    UNION
    SELECT i.task_id FROM parts JOIN item i ON i.parent_id = parts.id
), forgotten_parts AS (
    DELETE FROM task t USING parts WHERE t.id = parts.id RETURNING t.status
), forgotten_streams AS (
    DELETE FROM job_stream s USING parts WHERE s.task_id = parts.id
), forgotten_outputs AS (
    DELETE FROM output o USING again WHERE o.task_id = again.id
), forgotten_results AS (
    DELETE FROM result r USING again WHERE r.task_id = again.id
), forgotten_notes AS (
    DELETE FROM note n USING again JOIN task t ON t.id = again.id
    WHERE n.task_id = again.id AND (t.step <> $2 OR t.status = 'succeeded')
), rewound AS (
    UPDATE task t
    SET status = CASE WHEN t.status = 'succeeded' THEN 'skipped' ELSE t.status END,
        waiting_on = (SELECT count(*) FROM task p
                      WHERE p.job_id = t.job_id AND t.id = ANY(p.unblocks) AND NOT p.contained
                        AND p.id NOT IN (SELECT id FROM parts)
                        AND (p.status <> 'succeeded' OR p.id IN (SELECT id FROM again)))
    FROM again, task AS before
    WHERE t.id = again.id AND before.id = t.id AND t.finished_at IS NOT NULL
    RETURNING before.status AS was
)
-- `steps_left` counts the steps that have not succeeded. So succeeded steps are added, and the deleted parts that it
-- still counts are subtracted.
UPDATE job j SET steps_left = j.steps_left + (SELECT count(*) FROM rewound WHERE was = 'succeeded')
                                  - (SELECT count(*) FROM forgotten_parts WHERE status <> 'succeeded')
WHERE j.id = $1
RETURNING (SELECT count(*) FROM rewound)
