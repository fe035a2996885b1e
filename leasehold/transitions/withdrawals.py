"""A withdrawal is a job that cancels an order which another job has made at another system. The withdrawal needs the
data of the order, which are in the other job. So before the other job is deleted, this module copies them into the
withdrawal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from leasehold.db.database import Connection


@dataclass(frozen=True, slots=True)
class Withdrawals:
    """How a kind of work withdraws its orders.

    `pipeline`: the pipeline of the jobs that make orders. `step`: the step that makes the order; its result has the
    order's id as `ref`. `withdrawal`: the pipeline of the withdrawals. `content`: the parameters that are not copied
    into a withdrawal. They are the client's content, so they must be deleted with the job.
    """

    pipeline: str
    step: str
    withdrawal: str
    content: Sequence[str]


# The `exclusive_key` of a withdrawal is the id of the job that made the order, so a unique index finds the withdrawal.
# The statement copies only from jobs that may be deleted now (`expires_at` has passed). In the statement, `j` is the
# job that made the order, and `w` is its withdrawal. $1: the ids of jobs that are to be deleted. $2 to $5: `content`,
# `pipeline`, `step` and `withdrawal` of Withdrawals.
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
    """Copy the orders of these jobs into their unfinished withdrawals. `of`: how the kind of these jobs withdraws its
    orders. Call this before the jobs are deleted. Without the copy, a withdrawal could not cancel its order any more,
    and the order would go on to cost money.
    """
    await connection.execute(KEEP_ORDERS, list(job_ids), list(of.content), of.pipeline, of.step, of.withdrawal)
