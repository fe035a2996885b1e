"""Builds the SQL that finds the lines of waiting tasks. The tasks of one queue, priority and tenant are a line."""

from __future__ import annotations

#: A statement reads at most this many queue names. Tenants name the queues of external workers, so there may be very
#: many.
_MAX_QUEUES = 10_000
#: SQL condition: the task `t` waits to run, now or later.
_WAITS = "t.status IN ('pending', 'retry', 'waiting')"


def lines_of_all_queues(most: str) -> str:
    """SQL: CTEs of a WITH RECURSIVE. The last CTE, `line(queue, priority, tenant_id)`, has a row for each line of the
    first _MAX_QUEUES queues by name. The CTEs jump through the index task_runnable from queue to queue and from line to
    line, so they read only the first task of each queue and of each line. `most`: the parameter of the statement that
    bounds the number of lines, for example `$1`.

    If there are more lines than `most`, `line` first gets lines of the platform's own queues: one line of each queue,
    then a second line of each queue, and so on. So a queue with many tenants hides no other queue. If these are fewer
    than `most`, `line` then gets lines of the queues of external workers (`ext:`) in the same way.
    """
    return f"""
queue_name(queue, nth) AS (
    (SELECT t.queue, 1 FROM task t WHERE {_WAITS} ORDER BY t.queue LIMIT 1)
    UNION ALL
    SELECT next.queue, queue_name.nth + 1
    FROM queue_name CROSS JOIN LATERAL (
        SELECT t.queue FROM task t WHERE {_WAITS} AND t.queue > queue_name.queue ORDER BY t.queue LIMIT 1) AS next
    WHERE queue_name.nth < {_MAX_QUEUES}
), {_lines("own_line", "NOT starts_with(queue, 'ext:')", most)}, {
        _lines("external_line", "starts_with(queue, 'ext:')", most)
    }, line AS MATERIALIZED (
    SELECT queue, priority, tenant_id
    FROM (SELECT * FROM own_line UNION ALL SELECT * FROM external_line) AS both_kinds LIMIT {most}
)
""".strip("\n")


def _lines(name: str, of_queues: str, most: str) -> str:
    """SQL: the CTE `name` with the lines of some queues. `of_queues`: an SQL condition that chooses these queues. Each
    step of the recursion finds the next line of each queue. The recursion ends early when `line` has as many lines as
    its LIMIT allows.
    """
    return f"""{name}(queue, priority, tenant_id) AS (
    SELECT named.queue, first.priority, first.tenant_id
    FROM (SELECT queue FROM queue_name WHERE {of_queues} ORDER BY nth LIMIT {most}) AS named CROSS JOIN LATERAL (
        SELECT t.priority, t.tenant_id FROM task t WHERE {_WAITS} AND t.queue = named.queue
        ORDER BY t.priority, t.tenant_id LIMIT 1) AS first
    UNION ALL
    SELECT {name}.queue, next.priority, next.tenant_id
    FROM {name} CROSS JOIN LATERAL (
        SELECT t.priority, t.tenant_id FROM task t
        WHERE {_WAITS} AND t.queue = {name}.queue AND (t.priority, t.tenant_id) > ({name}.priority, {name}.tenant_id)
        ORDER BY t.priority, t.tenant_id LIMIT 1) AS next
)"""
