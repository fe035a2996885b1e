"""Keeps what a withdrawal needs when the job of its order is deleted. A withdrawal is a job of a pipeline of its own:
it cancels an order that another job has made at another system.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from leasehold.db.database import Connection


@dataclass(frozen=True, slots=True)
class Withdrawals:
    """`pipeline`: of the jobs that order. `step`: the step that orders; its result has the order's id as `ref`.
    `withdrawal`: the pipeline of the withdrawals. `content`: parameters that a withdrawal does without: they are the
    client's content, and go with the deleted job.
    """

    pipeline: str
    step: str
    withdrawal: str
    content: Sequence[str]


# A withdrawal has the id of the job that ordered as `exclusive_key`, so a unique index finds it.
KEEP_ORDERS = """
-- keep_orders
UPDATE job w
SET params = w.params || jsonb_build_object('order',
    jsonb_build_object('params', j.params - $2::text[], 'ref', r.value ->> 'ref'))
FROM job j JOIN task t ON t.job_id = j.id AND t.step = $4 JOIN result r ON r.task_id = t.id
WHERE j.id = ANY($1::uuid[]) AND j.expires_at < clock_timestamp() AND j.pipeline = $3
  AND r.value ? 'ref'
  AND w.tenant_id = j.tenant_id AND w.pipeline = $5 AND w.exclusive_key = j.id::text
  AND w.finished_at IS NULL
"""


async def keep_orders(connection: Connection, job_ids: Sequence[UUID], of: Withdrawals) -> None:
    """Copy the orders of these jobs into their unfinished withdrawals. Call this before the jobs are deleted: an order
    still costs money until the other system is told.
    """
    await connection.execute(KEEP_ORDERS, list(job_ids), list(of.content), of.pipeline, of.step, of.withdrawal)
