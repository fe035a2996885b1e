"""`suspend`: a workflow waits. Its calls (those that its code has made on the context `ctx` since the last commit) are
committed, and its lease ends. A signal, the end of a step or a time makes the workflow due again. In the same commit,
the worker may claim one of the steps that the calls start.

`task.news` counts the signals that have come for a workflow, and its steps that have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from operator import attrgetter
from time import monotonic
from typing import Any
from uuid import UUID

import orjson

from leasehold.broker.outbox import RELAY_AT
from leasehold.db.database import Connection
from leasehold.domain.backoff import capped
from leasehold.domain.lease import Lease
from leasehold.transitions.claims import Claimed, LeaseTerms, claimed_of
from leasehold.transitions.settlements.guard import HELD_IN_LIVE_JOB, lease_columns, settle_twice, settled_of
from leasehold.transitions.settlements.records import Settled
from leasehold.transitions.workflows.journal_sql import write_calls
from leasehold.transitions.workflows.records import Call, calls_column

# $1 to $3: the leases (`lease_columns`). $4: the calls of each workflow. $5: `news` when the worker read it; if `news`
# is higher now, the workflow is due immediately. $6: the workflow is due when `news` has grown by this number (NULL: it
# waits for a time only). $7: the workflow is due in any case after this many seconds (NULL: never). $8: for each
# workflow, the step that its calls start and that the same worker claims with this commit (NULL: none). $9: the
# duration of that step's lease. A claimed step gets no hint.
#
# HELD_IN_LIVE_JOB gives the CTEs `lease_batch` (the leases of this statement) and `held` (those that are still valid).
# write_calls gives the CTE `steps`: the steps that the calls start; those that the statement also claims are `running`,
# the others `pending`. `leased`: how many of the job's tasks have a lease. `wake_at` is not a time, but a value of
# `news`. `gated`: the job has concurrency limits. A hint is the message that tells workers of a due task.
SUSPEND = f"""-- suspend
WITH {HELD_IN_LIVE_JOB}{write_calls(claims=True)}, suspended_workflows AS (
    -- Writes only tasks that pass the guard (guard.py). The attempt does not count. Earlier errors and losses (attempts
    -- whose worker was lost) no longer count. `journaled`: the workflow has called something.
    UPDATE task t
    SET status = 'waiting', lease_owner = NULL, lease_until = NULL, attempt = t.attempt - 1, losses = 0, errors = 0,
        journaled = true,
        wake_at = CASE WHEN t.news = p.known_news THEN t.news + p.ends END,
        available_at = CASE WHEN t.news <> p.known_news THEN clock_timestamp()
                            WHEN p.delay IS NULL THEN 'infinity'
                            ELSE statement_timestamp() + make_interval(secs => p.delay) END
    FROM held JOIN unnest($5::int[], $6::int[], $7::float8[]) WITH ORDINALITY AS p(known_news, ends, delay, nth)
        ON p.nth = held.nth
    WHERE t.id = held.id
    RETURNING t.id, t.job_id, t.step, t.epoch, t.queue, t.priority, t.available_at, t.news <> p.known_news AS is_due
), advanced_jobs AS (
    UPDATE job j
    SET event_seq = j.event_seq + counts.suspended + counts.claimed,
        leased = j.leased - counts.suspended + counts.claimed, steps_left = j.steps_left + counts.started
    FROM (
        SELECT job_id, sum(suspended)::int AS suspended, sum(started)::int AS started, sum(claimed)::int AS claimed
        FROM (SELECT job_id, 1 AS suspended, 0 AS started, 0 AS claimed FROM suspended_workflows
              UNION ALL SELECT job_id, 0, 1, (status = 'running')::int FROM steps) AS changes
        GROUP BY job_id
    ) AS counts
    WHERE j.id = counts.job_id
    -- `last_seq`: the number of the job's last event before this statement.
    RETURNING j.id, j.tenant_id, j.status, j.trace, j.event_seq - counts.suspended - counts.claimed AS last_seq,
              counts.suspended, counts.started, j.pipeline, j.pipeline_version, j.inputs, j.output_prefix, j.gated,
              j.grace_seconds
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT s.job_id, a.last_seq + row_number() OVER (PARTITION BY s.job_id ORDER BY s.id), a.tenant_id, 'suspended',
           a.status, s.id, s.step, 'waiting', s.epoch,
           jsonb_build_object('until', nullif(s.available_at, 'infinity'), 'steps', a.started)
    FROM suspended_workflows s JOIN advanced_jobs a ON a.id = s.job_id
), claimed_steps AS MATERIALIZED (
    -- The steps that this statement claims. A step's name may have a number after `#`; an object's key has a point
    -- instead.
    SELECT s.*, a.tenant_id, a.pipeline, a.pipeline_version, a.inputs, a.trace, a.gated, a.grace_seconds,
           a.status AS job_status, a.output_prefix || '/' || replace(s.step, '#', '.') AS output_prefix,
           a.last_seq + a.suspended + row_number() OVER (PARTITION BY s.job_id ORDER BY s.id) AS seq
    FROM steps s JOIN advanced_jobs a ON a.id = s.job_id
    WHERE s.status = 'running'
), claim_events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT job_id, seq, tenant_id, 'claimed', job_status, id, step, 'running', epoch,
           jsonb_build_object('worker', lease_owner, 'attempt', attempt)
    FROM claimed_steps
), hints AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT s.id, s.job_id, s.queue, s.priority, a.trace, {RELAY_AT}
    FROM (SELECT id, job_id, queue, priority FROM steps WHERE status = 'pending'
          UNION ALL SELECT id, job_id, queue, priority FROM suspended_workflows WHERE is_due) AS s
    JOIN advanced_jobs a ON a.id = s.job_id
    RETURNING id, task_id, queue, priority, headers
)
-- The verdict for each lease.
SELECT a.id AS task_id, 'waiting' AS state,
       -- The second case: an earlier suspend of this lease has succeeded, and its answer was lost.
       coalesce(s.id IS NOT NULL OR (t.epoch = a.epoch AND t.status = 'waiting'), false) AS settled,
       NULL::bigint AS outbox_id, NULL::text AS queue, NULL::int AS priority, NULL::jsonb AS headers,
       NULL::jsonb AS next
FROM lease_batch a LEFT JOIN suspended_workflows s ON s.id = a.id LEFT JOIN task t ON t.id = a.id
UNION ALL
-- The hints to publish.
SELECT h.task_id, NULL, NULL, h.id, h.queue, h.priority, h.headers, NULL FROM hints h
UNION ALL
-- The steps that were claimed.
SELECT t.id, NULL, NULL, NULL, NULL, NULL, NULL, jsonb_build_object(
    'id', t.id, 'epoch', t.epoch, 'attempt', t.attempt, 'job_id', t.job_id, 'tenant_id', t.tenant_id, 'step', t.step,
    'queue', t.queue, 'priority', t.priority, 'errors', 0, 'crashes', 0, 'was', 'pending', 'waited', 0,
    'handler', t.handler, 'timeout_seconds', t.timeout_seconds, 'pipeline', t.pipeline,
    'pipeline_version', t.pipeline_version, 'inputs', t.inputs, 'output_prefix', t.output_prefix, 'trace', t.trace,
    'gated', t.gated, 'grace_seconds', t.grace_seconds, 'cancelling', false, 'is_last', false)
FROM claimed_steps t
"""


@dataclass(frozen=True, slots=True)
class Suspending:
    """A workflow that waits. `known_news`: the value of `task.news` that the worker read together with the journal; if
    the value has grown since, the workflow is due immediately. `ends`: the workflow is due when this many more of its
    steps have ended; a signal counts as an end; None: only `delay` makes it due. `delay`: seconds until the workflow is
    due in any case; None: there is no such time. `step_to_claim`: one of the steps that `calls` start on the workflow's
    queue; the worker has room to run it.
    """

    lease: Lease
    calls: tuple[Call, ...]
    known_news: int
    ends: int | None = None
    delay: float | None = None
    step_to_claim: UUID | None = None

    def claiming_next(self, queue: str) -> Suspending:
        """A copy of this suspension that also claims the first step that its calls start on `queue`, if any."""
        started = (call.child for call in self.calls if call.step is not None and call.queue == queue)
        return Suspending(self.lease, self.calls, self.known_news, self.ends, self.delay, next(started, None))


async def suspend(
    connection: Connection, suspendings: Sequence[Suspending], terms: LeaseTerms | None = None
) -> Settled:
    """running -> waiting: writes the calls and the steps that they start. The attempt does not count.

    With `terms`, the step `step_to_claim` of each workflow starts as running, and the workflow's worker gets the step's
    lease. Without `terms`, no step is claimed.
    """
    return await settle_twice(partial(_suspend, connection, terms), suspendings, attrgetter("lease"))


async def _suspend(connection: Connection, terms: LeaseTerms | None, suspendings: Sequence[Suspending]) -> Settled:
    requested_at = monotonic()
    claimed_ids = [None if terms is None else suspending.step_to_claim for suspending in suspendings]
    rows = await connection.fetch(
        SUSPEND,
        *lease_columns([suspending.lease for suspending in suspendings]),
        calls_column([suspending.calls for suspending in suspendings]),
        [suspending.known_news for suspending in suspendings],
        [suspending.ends for suspending in suspendings],
        [None if suspending.delay is None else capped(suspending.delay) for suspending in suspendings],
        claimed_ids,
        timedelta(seconds=0.0 if terms is None else terms.ttl),
    )
    # A row with `next` is a claimed step. All other rows are verdicts and hints.
    outcome = settled_of([row for row in rows if row["next"] is None], hints=True)
    if terms is not None:
        suspending_of_step = {suspending.step_to_claim: suspending for suspending in suspendings}
        for row in rows:
            if row["next"] is not None:
                suspending = suspending_of_step[row["task_id"]]
                outcome.next_steps[suspending.lease.task_id] = _claimed_step(
                    row["next"], suspending, terms, requested_at
                )
    return outcome


def _claimed_step(row: dict[str, Any], suspending: Suspending, terms: LeaseTerms, requested_at: float) -> Claimed:
    """The step that the statement has claimed. `row` comes from JSON, so its ids are text. `row` lacks the step's
    argument, so this function takes the argument from the call.
    """
    step_id = UUID(row["id"])
    argument = next(call.argument for call in suspending.calls if call.child == step_id)
    params = orjson.loads(orjson.dumps(argument))  # a copy, so that the step shares no object with the workflow
    return claimed_of(row | {"id": step_id, "job_id": UUID(row["job_id"]), "params": params}, terms, requested_at)
