"""What the statements write to PostgreSQL's log."""

from __future__ import annotations

import secrets
from typing import Any

from leasehold.transitions import claims, settlements
from leasehold.transitions.settlements import Completion
from tests.factories import Rows

_LOG = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
_JOBS = 10


async def written_by_claims_and_completions(rows: Rows, params: dict[str, Any]) -> tuple[int, int]:
    """The bytes that the cheapest of several claims writes, and the cheapest completion. The others may have begun a
    page after a checkpoint, or other sessions may have written beside them.
    """
    claimed, completed = [], []
    for hint in await rows.submit(count=_JOBS, params=params):
        before = await rows.connection.fetchval(_LOG)
        (claim,) = await claims.claim(rows.connection, rows.terms, [hint.hint.task_id])
        between = await rows.connection.fetchval(_LOG)
        await settlements.complete(rows.connection, [Completion(claim.lease, is_last=True)])
        claimed.append(int(between - before))
        completed.append(int(await rows.connection.fetchval(_LOG) - between))
    return min(claimed), min(completed)


async def test_a_claim_and_a_completion_do_not_write_the_jobs_parameters_again(rows: Rows) -> None:
    small = await written_by_claims_and_completions(rows, {})
    large = await written_by_claims_and_completions(rows, {"text": secrets.token_urlsafe(900)})
    assert large[0] - small[0] < 500
    assert large[1] - small[1] < 500
