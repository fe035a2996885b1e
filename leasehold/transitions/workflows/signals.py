"""`send` stores a client's signal to a run until the run's workflow consumes it, and wakes the workflow if it waits for
the signal. `waits_of` and `schema_of` read the waits that are open.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from uuid import UUID

import orjson
from jsonschema_rs import Draft202012Validator

from leasehold.broker.outbox import RELAY_AT, Announcement
from leasehold.db.database import Connection
from leasehold.db.job_reads import Row
from leasehold.domain.errors import Conflict, Invalid, NotFound, TooMany
from leasehold.evaluation.child import first_mismatch
from leasehold.evaluation.evaluator import mismatch_sentence
from leasehold.evaluation.model_schemas import compile_model_schema

#: Seconds after which a client may try again when a run has too many signals.
_RETRY_SECONDS = 5.0
#: The cache of `_validator` holds at most this many compiled schemas.
_MAX_VALIDATORS = 256

# This statement only locks the job. SEND runs after it in the same transaction. The reason: a suspension of the
# workflow (settlements/suspending.py) holds the job's lock while it writes the rows of the workflow's waits to the
# table `journal`. If SEND itself waited for the lock, it would not see these rows, because a statement that waits keeps
# its old snapshot.
_LOCK = """
-- signal_lock
SELECT j.finished_at IS NOT NULL AS ended, j.status = 'cancel_requested' AS cancelling FROM job j
WHERE j.id = $1 AND j.tenant_id = $2
FOR UPDATE
"""

# $1 is the job, $2 is its tenant, $3 is the signal's name, and $4 is its payload (NULL: the JSON null). A run may have
# at most $5 unconsumed signals. The column `news` of `task` counts, for a workflow, the signals that have come and the
# workflow's steps that have ended. `journaled`: the task is a workflow that has made a call.
SEND = f"""
-- signal
WITH stored_signal AS (
    INSERT INTO signal (job_id, tenant_id, name, payload)
    SELECT $1, $2, $3, coalesce($4::jsonb, 'null')
    WHERE (SELECT count(*) FROM (SELECT FROM signal s WHERE s.job_id = $1 LIMIT $5) AS unconsumed) < $5
    RETURNING id
), woken_workflow AS (
    -- Count the signal in `news`. A running workflow compares the count when it suspends. If the count has risen since
    -- the workflow read its journal, the workflow is due again immediately. A workflow that waits for this signal is
    -- due now. The UPDATE leaves out the steps that the workflow has started (`contained`). It also leaves out a
    -- workflow that was never claimed (`epoch` is 0), because such a workflow reads all signals when it starts. A step
    -- beside the workflow that snoozes (it is not `journaled`) stays as it is: it has asked for its delay.
    UPDATE task t
    SET news = t.news + 1,
        wake_at = CASE WHEN t.status = 'waiting' THEN NULL ELSE t.wake_at END,
        available_at = CASE t.status WHEN 'waiting' THEN clock_timestamp() ELSE t.available_at END
    FROM stored_signal
    WHERE t.job_id = $1 AND NOT t.contained AND t.epoch > 0
      AND CASE t.status
          WHEN 'running' THEN true
          WHEN 'waiting' THEN t.journaled AND EXISTS (
              SELECT 1 FROM journal e
              WHERE e.job_id = $1 AND e.kind = 'signal' AND e.state = 'open' AND e.name = $3)
          ELSE false END
    RETURNING t.id, t.job_id, t.queue, t.priority, t.status
), hints AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT w.id, w.job_id, w.queue, w.priority, (SELECT j.trace FROM job j WHERE j.id = w.job_id),
           {RELAY_AT}
    FROM woken_workflow w WHERE w.status = 'waiting'
    RETURNING id, task_id, queue, priority, headers
)
SELECT s.id AS signal_id, h.id AS outbox_id, h.task_id, h.queue, h.priority, h.headers
FROM stored_signal s LEFT JOIN hints h ON true
"""

# The schema of the payload for the first open wait of the run $1 (of the tenant $2) for the signal $3.
_SCHEMA = """
-- signal_schema
SELECT e.value -> 'schema' FROM journal e JOIN job j ON j.id = e.job_id
WHERE e.job_id = $1 AND j.tenant_id = $2 AND e.kind = 'signal' AND e.state = 'open' AND e.name = $3
ORDER BY e.branch, e.number LIMIT 1
"""


# PostgreSQL uses the index of open waits. If several branches of the workflow wait for the same signal, the statement
# returns the wait of the first branch.
_WAITS = """
-- signal_waits
SELECT DISTINCT ON (e.name) e.name, e.value -> 'schema' AS schema, e.due_at, e.branch, e.number, e.epoch
FROM journal e JOIN job j ON j.id = e.job_id
WHERE e.job_id = $1 AND j.tenant_id = $2 AND e.kind = 'signal' AND e.state = 'open'
ORDER BY e.name, e.branch, e.number LIMIT 20
"""


async def waits_of(connection: Connection, run_id: UUID, tenant_id: str) -> Sequence[Row]:
    """The signals for which the run's workflow waits now, at most 20. Each row has the signal's name, the schema of its
    payload, and the time at which the wait ends by itself. A workflow may wait several times for signals of one name,
    so a row also has the place (`branch`, `number`) and the `epoch`, which identify the wait.
    """
    return await connection.fetch(_WAITS, run_id, tenant_id)


async def schema_of(connection: Connection, run_id: UUID, tenant_id: str, name: str) -> dict[str, Any] | None:
    """The JSON Schema for the payload of the signal `name`, from the run's first open wait for it. Returns None if no
    such wait is open, or if the wait accepts any payload.
    """
    schema: dict[str, Any] | None = await connection.fetchval(_SCHEMA, run_id, tenant_id, name)
    return schema


@lru_cache(_MAX_VALIDATORS)
def _validator(schema: bytes) -> Draft202012Validator:
    """The validator for the schema of a wait. Validators are cached, because a compilation takes long, and `send` holds
    the job's lock meanwhile.
    """
    return compile_model_schema(orjson.loads(schema))


async def send(
    connection: Connection, run_id: UUID, tenant_id: str, name: str, payload: Any, *, at_most: int
) -> Sequence[Announcement]:
    """Store the signal, and wake a workflow that waits for this signal. Call this in a transaction. After the commit,
    the caller publishes the returned hints (messages that tell workers of due tasks).

    Raises NotFound `run_not_found`, and Conflict `run_ended`. Raises Invalid `invalid_payload` if the run waits for the
    signal now and the payload does not fit the schema of the wait. Raises TooMany `too_many_signals` if the run already
    has `at_most` signals that it has not consumed.
    """
    job = await connection.fetchrow(_LOCK, run_id, tenant_id)
    if job is None:
        raise NotFound("run_not_found", "There is no such run.")
    if job["ended"] or job["cancelling"]:
        raise Conflict("run_ended", "The run has ended, or is being cancelled: it takes no signals.")
    # Read the schema after the lock, so that the query sees a wait that a suspension has written meanwhile.
    schema = await schema_of(connection, run_id, tenant_id, name)
    if schema is not None and (problem := first_mismatch(_validator(orjson.dumps(schema)), payload)) is not None:
        raise Invalid("invalid_payload", mismatch_sentence(*problem))
    rows = await connection.fetch(SEND, run_id, tenant_id, name, payload, at_most)
    if not rows:
        message = f"The run has {at_most} signals that it has not consumed (LEASEHOLD_RUN_SIGNALS)."
        raise TooMany("too_many_signals", message, policy="signals", at_most=at_most, retry_after=_RETRY_SECONDS)
    return [Announcement.from_row(row) for row in rows if row["outbox_id"] is not None]
