"""Before a job is deleted, the order that it made goes to the withdrawal that waits for it, and to no other job."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from leasehold.domain.pipeline import Pipeline, Step
from leasehold.transitions import settlements, withdrawals
from leasehold.transitions.settlements import Completion
from leasehold.transitions.withdrawals import Withdrawals
from tests.factories import ONE, THREE, Rows

CANCEL = Pipeline("cancel", module="tests.factories", steps=[Step("only", queue="elsewhere")])
OF_ONE = Withdrawals(pipeline="one", step="only", withdrawal="cancel", content=("secret",))


async def ordered(rows: Rows, ref: str | None, pipeline: Pipeline = ONE, tenant: str = "t") -> UUID:
    """A job that made an order, and may be deleted now. None: it got no order."""
    claimed = await rows.leased(pipeline, tenant=tenant, params={"size": ref or "", "secret": "s"})
    await settlements.complete(rows.connection, [Completion(claimed.lease, value={"ref": ref} if ref else {"no": 1})])
    await rows.connection.execute("UPDATE job SET expires_at = clock_timestamp() WHERE id = $1", claimed.job_id)
    return claimed.job_id


async def withdrawal_of(rows: Rows, order: UUID, pipeline: Pipeline = CANCEL, tenant: str = "t") -> UUID:
    (hint,) = await rows.submit(pipeline, tenant=tenant, exclusive_key=str(order), params={"kept": True})
    job_id: UUID = (await rows.task(hint.hint.task_id))["job_id"]
    return job_id


async def test_the_orders_of_the_jobs_that_are_deleted_go_to_their_own_withdrawals(rows: Rows) -> None:
    """What a job's client wrote does not. Other jobs that name the same job, and withdrawals of jobs that made no
    order, that are not named, that stay or are of another kind, are left as they are.
    """
    orders = [await ordered(rows, ref) for ref in ("first", "second")]
    own = [await withdrawal_of(rows, order) for order in orders]
    of_no_order, not_named = await ordered(rows, None), await ordered(rows, "not named")
    of_another_kind, stays = await ordered(rows, "another kind", THREE), await ordered(rows, "stays")
    await rows.connection.execute("UPDATE job SET expires_at = NULL WHERE id = $1", stays)
    for order in (of_no_order, not_named, of_another_kind, stays):
        await withdrawal_of(rows, order)
    await withdrawal_of(rows, orders[0], ONE)
    await withdrawal_of(rows, orders[0], tenant="u")
    over = await withdrawal_of(rows, await ordered(rows, "over"))
    await rows.connection.execute(
        "UPDATE job SET status = 'cancelled', finished_at = clock_timestamp() WHERE id = $1", over
    )

    async def jobs() -> dict[UUID, dict[str, Any]]:
        return {row["id"]: dict(row) for row in await rows.connection.fetch("SELECT * FROM job")}

    before = await jobs()
    of_over = UUID(before[over]["exclusive_key"])
    await withdrawals.keep_orders(rows.connection, [*orders, of_no_order, of_another_kind, stays, of_over], OF_ONE)
    after = await jobs()
    assert {one for one in before if before[one] != after[one]} == set(own)
    for one, ref in zip(own, ("first", "second"), strict=True):
        kept = {"kept": True, "order": {"params": {"size": ref}, "ref": ref}}
        assert after[one] == before[one] | {"params": kept}
