"""The judge of journals finds what a zombie would have written."""

from __future__ import annotations

import pytest

from leasehold.transitions import sweeps
from leasehold.transitions.workflows import recording
from leasehold.transitions.workflows.records import Call, Recording
from tests.factories import Rows, terms
from tests.workflows.conftest import Runs
from tests.workflows.promises import assert_journal

BROKEN = {
    "an epoch that nobody had": "UPDATE journal SET epoch = 7",
    "a row from before the lease": "UPDATE journal SET at = at - interval '1 h'",
    "a row of a lease that had ended": "UPDATE journal SET at = at + interval '1 h'",
}


@pytest.mark.parametrize("how", BROKEN)
async def test_a_broken_journal_is_red(runs: Runs, how: str) -> None:
    rows = Rows(runs.connection, terms())
    claimed = await rows.leased()
    done = Call("", 1, "call", "f", "done", {"value": 1})
    await recording.record(runs.connection, [Recording(claimed.lease, (done,))])
    await rows.lapse(claimed.lease.task_id)
    await rows.claim_all()
    await sweeps.expire_leases(runs.connection, [], 5)
    await assert_journal(runs.connection, claimed.job_id)
    await runs.connection.execute(BROKEN[how])
    with pytest.raises(AssertionError):
        await assert_journal(runs.connection, claimed.job_id)
    await runs.connection.execute("DELETE FROM journal")
