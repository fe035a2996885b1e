"""Numbers the lines of a job's log, and the chunks of its stream. The two statements that write them, APPEND_LOG
(logs.py) and APPEND_STREAM (streams.py), end with the SQL of this module.

The table `tail` has a row for each job, which numbers the job's lines and the job's chunks. Each of the two statements
locks this row until its lines or chunks are committed. So after a reader has read line 7, no new line 6 can appear.
"""

from __future__ import annotations


def insert_numbered(table: str, sequence: str, columns: str) -> str:
    """SQL: the end of a statement that begins with a CTE named `chunk`. This CTE has a row for each row that `table`
    gets. Such a row has several items, which are log lines or chunks of the stream. `n`: the number of its items.
    `first`: the number of its first item among the items of the attempt. `nth`: the place of the row in the order in
    which the rows are written. `running_total`: the number of the job's items in this row and the rows before it.

    `sequence`: the column of `tail` that numbers the items. `columns`: the columns that only this `table` has, and not
    the table of the other statement.

    The statement may be repeated. A repeated row has the same task, epoch and `first` as the row that was written. So
    it conflicts with that row, and is not written again. The numbers that the repeated row got stay unused.
    """
    return f"""numbered AS (
    INSERT INTO tail AS o (job_id, {sequence})
    SELECT job_id, sum(n) FROM chunk GROUP BY job_id ORDER BY job_id
    ON CONFLICT (job_id) DO UPDATE SET {sequence} = o.{sequence} + excluded.{sequence}
    RETURNING job_id, {sequence}
), total AS (
    SELECT job_id, sum(n) AS n FROM chunk GROUP BY job_id
)
INSERT INTO {table} (job_id, last, tenant_id, task_id, step, epoch, attempt, first, n, {columns})
SELECT c.job_id, numbered.{sequence} - total.n + c.running_total, c.tenant_id, c.id, c.step, c.epoch, c.attempt,
       c.first, c.n, {", ".join(f"c.{column}" for column in columns.split(", "))}
FROM chunk c JOIN numbered ON numbered.job_id = c.job_id JOIN total ON total.job_id = c.job_id
ORDER BY c.nth
ON CONFLICT (task_id, epoch, first) DO NOTHING
"""
