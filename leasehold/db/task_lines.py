"""Builds the SQL that finds the lines of waiting tasks. A line is the tasks of one queue, priority and tenant."""

from __future__ import annotations


def lines_of_all_queues(most: str) -> str:
    """SQL: the recursive query of the CTE `line(queue, priority, tenant_id, nth)`. It returns each line that has a
    task, and `nth` counts the lines. The query jumps through the index task_runnable from line to line, so it reads
    only the first task of each line. `most`: the statement's parameter with the most lines to return, for example `$1`.
    """
    return f"""
    (SELECT t.queue, t.priority, t.tenant_id, 1 FROM task t
     WHERE t.status IN ('pending', 'retry', 'waiting') ORDER BY t.queue, t.priority, t.tenant_id LIMIT 1)
    UNION ALL
    SELECT next.queue, next.priority, next.tenant_id, line.nth + 1
    FROM line CROSS JOIN LATERAL (
        SELECT t.queue, t.priority, t.tenant_id FROM task t
        WHERE t.status IN ('pending', 'retry', 'waiting')
          AND (t.queue, t.priority, t.tenant_id) > (line.queue, line.priority, line.tenant_id)
        ORDER BY t.queue, t.priority, t.tenant_id LIMIT 1) AS next
    WHERE line.nth < {most}
""".strip("\n")
