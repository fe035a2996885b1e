"""Keeps what a withdrawal needs when its generation is deleted. A withdrawal is a job that cancels the order of a
generation at the provider.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from leasehold.db.database import Connection

#: The parameters that a withdrawal does without. They are the client's content, and go with the deleted generation.
_CONTENT = ["prompt", "negative_prompt", "images", "extra"]
# A withdrawal has its generation's id as `exclusive_key`, so a unique index finds it.
KEEP_ORDERS = """
-- generation_keep_orders
UPDATE job w
SET params = w.params || jsonb_build_object('order',
    jsonb_build_object('params', j.params - $2::text[], 'ref', r.value ->> 'ref'))
FROM job j JOIN task t ON t.job_id = j.id AND t.step = 'submit' JOIN result r ON r.task_id = t.id
WHERE j.id = ANY($1::uuid[]) AND j.expires_at < clock_timestamp() AND j.pipeline = 'generation'
  AND r.value ? 'ref'
  AND w.tenant_id = j.tenant_id AND w.pipeline = 'generation_withdrawal' AND w.exclusive_key = j.id::text
  AND w.finished_at IS NULL
"""


async def keep_orders(connection: Connection, job_ids: Sequence[UUID]) -> None:
    """Copy the orders of generations into their unfinished withdrawals. Call this before the jobs are
    deleted: the order still costs money until its provider is told.
    """
    await connection.execute(KEEP_ORDERS, list(job_ids), _CONTENT)
