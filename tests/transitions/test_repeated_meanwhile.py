"""A settlement that is sent again while its first try is still under way happens once, and both tries are told so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from leasehold.db.database import Connection
from leasehold.domain.lease import Lease
from leasehold.domain.pipeline import Pipeline
from leasehold.transitions import jobs, settlements
from leasehold.transitions.settlements import (
    Completion,
    Failure,
    FanningOut,
    Part,
    Settled,
    Snoozing,
    Suspending,
    Verdict,
)
from tests.factories import ONE, THREE, Rows, assert_history
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open

#: The pipeline of the job, and the settlement of its first step.
KINDS: dict[str, tuple[Pipeline, Callable[[Connection, Lease], Awaitable[Settled]]]] = {
    "complete": (THREE, lambda connection, lease: settlements.complete(connection, [Completion(lease)])),
    "complete_last": (
        ONE,
        lambda connection, lease: settlements.complete(connection, [Completion(lease, is_last=True)]),
    ),
    "fail": (
        ONE,
        lambda connection, lease: settlements.fail(connection, [Failure(lease, "error", "e", "m", True, 60.0)]),
    ),
    "snooze": (ONE, lambda connection, lease: settlements.snooze(connection, [Snoozing(lease, 60.0)])),
    "suspend": (ONE, lambda connection, lease: settlements.suspend(connection, [Suspending(lease, (), 0)])),
    "release": (ONE, lambda connection, lease: settlements.release(connection, [lease])),
    "fan_out": (
        ONE,
        lambda connection, lease: settlements.fan_out(
            connection, [FanningOut(lease, [Part("x", "default", 1, "one.only", 1)])]
        ),
    ),
    "acknowledge_cancel": (ONE, lambda connection, lease: settlements.acknowledge_cancel(connection, [lease])),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_the_second_try_hears_that_the_first_has_settled_the_task(rows: Rows, another: Open, kind: str) -> None:
    """The client has given the first try up, or a proxy has sent its request twice."""
    pipeline, settle = KINDS[kind]
    claimed = await rows.leased(pipeline)
    if kind == "acknowledge_cancel":
        await jobs.request_cancel(rows.connection, [claimed.job_id], "t", reason="r", by="b")
    other = (await another()).connection
    async with other.transaction():
        first = await settle(other, claimed.lease)
        repeating = asyncio.create_task(_settled(settle, rows.connection, claimed.lease))
        await until_waiting(other)
    second = await repeating
    assert first.verdicts == second.verdicts == {claimed.lease.task_id: Verdict.SETTLED}
    assert (second.announcements, second.ended) == ([], [])
    assert None not in second.states.values()  # a state is told, or it is left out
    await assert_history(rows, claimed.job_id)


async def _settled(
    settle: Callable[[Connection, Lease], Awaitable[Settled]], connection: Connection, lease: Lease
) -> Settled:
    return await settle(connection, lease)
