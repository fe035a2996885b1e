"""The second half of the statements `claim` (by_hint.py) and `poll` (by_poll.py): the SQL that marks the tasks as
running, and writes their events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# The job's columns that a claim returns, among them `event_seq` (the number of the job's newest event) and `gated` (the
# job has concurrency limits). PostgreSQL reads them once, when it locks the job. A second join with the job would
# compare each task of a batch with each job, because the planner expects a CTE to return one row.
_JOB_COLUMNS = ("event_seq", "tenant_id", "pipeline", "pipeline_version", "params", "inputs", "output_prefix", "trace",
                "gated", "grace_seconds", "cancelling")  # fmt: skip
#: The job's columns in the CTE `job_tasks`: the columns above, and `single_task`, which is the id of the job's task if
#: the job has only one (db/tables.py). Only `_MARK_CLAIMED` reads this column.
_COLUMNS_OF_JOB_TASKS = (*_JOB_COLUMNS, "single_task")

#: Column -> the expression that computes it from the table `job`. The claim reads all other columns as the table has
#: them. `cancelling`: the job is being cancelled. Of such a job, only a workflow can be claimed, so that its code sees
#: the cancel. Then `grace_seconds` is the rest of the grace (the time that a cancelled attempt has to stop).
_EXPRESSION_OF_COLUMN = {
    "cancelling": "j.status = 'cancel_requested'",
    "grace_seconds": "CASE WHEN j.cancel_by IS NULL THEN j.grace_seconds"
    " ELSE greatest(ceil(extract(epoch FROM j.cancel_by - clock_timestamp())), 0)::int END",
}


def job_columns(alias: str | None = None) -> str:
    """SQL: the list of the job's columns for `job_tasks`. `alias`: a CTE that has these columns already. If `alias` is
    None, the list computes them from the table `job`, which the statement calls `j`.
    """
    if alias is not None:
        return _columns(_COLUMNS_OF_JOB_TASKS, alias, {})
    return _columns(_COLUMNS_OF_JOB_TASKS, "j", _EXPRESSION_OF_COLUMN)


def _columns(names: Sequence[str], alias: str, replacements: Mapping[str, str]) -> str:
    """SQL: a list of columns. `replacements`: column -> an expression that replaces it."""
    return ", ".join(f"{replacements[name]} AS {name}" if name in replacements else f"{alias}.{name}" for name in names)


def output_prefix(job: str) -> str:
    """SQL: the output prefix of the task `t`. `job`: the alias of the row that has the job's prefix.

    A step that a workflow started (`contained`) has a prefix of its own: the job's prefix and the step's name. In this
    prefix a point replaces each `#` of the name, because a `#` would need quoting in a URL. A part of a fan-out (its
    name ends in a point and its number) also has a prefix of its own. The reason: one handler names the outputs of all
    parts, so with one prefix the parts would overwrite each other's outputs.
    """
    return f"""CASE WHEN t.contained OR strpos(t.step, '.') > 0
                     THEN {job}.output_prefix || '/' || replace(t.step, '#', '.')
                   ELSE {job}.output_prefix END"""


#: SQL: the parameters of the task `t`. A step that a workflow started has an argument of its own.
_PARAMS = """CASE WHEN t.contained THEN (SELECT i.value FROM item i WHERE i.task_id = t.id) ELSE job_tasks.params END"""
_OUTPUT_PREFIX = output_prefix("job_tasks")


def mark_claimed(may_be_claimed: str, is_loss: str = "job_tasks.was = 'running'") -> str:
    """SQL to append to a statement that has the CTE `job_tasks`. This CTE has tasks of locked jobs, with the columns
    id, `was` (the task's status until now) and job_columns. `may_be_claimed` is a condition of the rows `t` and
    `job_tasks`. The SQL claims the tasks that fulfil this condition. $2 is the owner of the lease, and $3 is its
    duration. The statement then reads the CTE `numbered_tasks`: a row for each claimed task, with all columns that
    `claimed_of` needs.

    `is_loss`: a condition of the same rows. If it is true, the claim charges the task a loss (an attempt whose worker
    was lost). By default a claim of a running task charges a loss, because the previous worker did not settle the task.
    """
    return _MARK_CLAIMED.replace("MAY_BE_CLAIMED", may_be_claimed).replace("IS_LOSS", is_loss)


# No earlier part of the statement locks the rows of `task`, because each lock would be one more record in the WAL. So
# the UPDATE may have to wait until another statement, such as a renewal of the lease, has released a row. Then
# PostgreSQL checks the condition of the UPDATE on the newest version of the row. Therefore the condition must test the
# row `t` itself, because `job_tasks` has the row only as it was when the statement began. The UPDATE leaves out a task
# that has started or stopped running since the statement began, because the counts below depend on `was`. `is_last`: no
# other task waits for the end of this task. `waited`: for how many seconds the task has been due.
#
# The first claim of a job's single task writes no event, because the view `history` derives the event from the task.
# The event's number (`claim_seq`) is the job's next number. Until this claim the job has no other task, so no other
# event takes that number.
_MARK_CLAIMED = f"""
, claimed_tasks AS (
    UPDATE task t
    SET status = 'running',
        lease_owner = $2,
        lease_until = clock_timestamp() + $3::interval,
        epoch = t.epoch + 1,
        attempt = t.attempt + 1,
        losses = t.losses + (IS_LOSS)::int,
        started_at = clock_timestamp(),
        claim_seq = CASE WHEN t.id = job_tasks.single_task AND t.epoch = 0 THEN job_tasks.event_seq + 1
                         ELSE t.claim_seq END
    FROM job_tasks
    WHERE t.id = job_tasks.id AND (t.status = 'running') = (job_tasks.was = 'running')
      AND MAY_BE_CLAIMED
    RETURNING t.id, t.job_id, t.step, t.queue, t.priority, t.epoch, t.attempt, t.errors, t.crashes, t.handler,
              t.timeout_seconds, t.unblocks = '{{}}' AS is_last, job_tasks.was,
              t.epoch = 1 AND t.claim_seq IS NOT NULL AS has_derived_event,
              extract(epoch FROM clock_timestamp() - t.available_at)::float8 AS waited,
              {_columns(_JOB_COLUMNS, "job_tasks", {"params": _PARAMS, "output_prefix": _OUTPUT_PREFIX})}
), numbered_tasks AS MATERIALIZED (
    -- The claimed tasks, numbered within their job for its events: `nth` of `task_count`. `leased`: how many of these
    -- tasks the job did not count as leased before. `becomes`: the job's new status.
    SELECT c.*, row_number() OVER (PARTITION BY job_id ORDER BY id) AS nth, (count(*) OVER job)::int AS task_count,
           (count(*) FILTER (WHERE was <> 'running' AND NOT cancelling) OVER job)::int AS leased,
           CASE WHEN cancelling THEN 'cancel_requested'
                WHEN bool_and(starts_with(queue, 'ext:')) OVER job THEN 'waiting_worker' ELSE 'running' END AS becomes
    FROM claimed_tasks c
    WINDOW job AS (PARTITION BY job_id)
), advanced_jobs AS (
    UPDATE job j
    SET status = per_job.becomes,
        leased = j.leased + per_job.leased,
        started_at = coalesce(j.started_at, clock_timestamp()),
        event_seq = j.event_seq + per_job.task_count
    FROM numbered_tasks per_job
    WHERE per_job.nth = 1 AND j.id = per_job.job_id
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT c.job_id, c.event_seq + c.nth, c.tenant_id, CASE WHEN c.was = 'running' THEN 'taken_over' ELSE 'claimed' END,
           c.becomes, c.id, c.step, 'running', c.epoch, jsonb_build_object('worker', $2::uuid, 'attempt', c.attempt)
    FROM numbered_tasks c WHERE NOT c.has_derived_event
)
"""
