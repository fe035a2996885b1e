"""Patroni fails over, on three nodes with its own Raft, while jobs are submitted and done: synchronous replication.

It takes about two minutes, and Patroni in an environment of its own, which the user `nobody` can read:
`python3 -m venv /opt/patroni && /opt/patroni/bin/pip install 'patroni[raft]' 'psycopg[binary]'`, then
`FAILOVER_PATRONI=/opt/patroni/bin/patroni scripts/test failover -k patroni`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest

from leasehold.db.database import connected, migrate
from tests.failover.load import Submissions, all_ended, nothing_was_charged, worker_of
from tests.failover.patroni import Cluster, Node, cluster_in, standing_still
from tests.support.not_here import only_where

PATRONI = os.environ.get("FAILOVER_PATRONI", "")
pytestmark = [
    only_where(bool(PATRONI), "Patroni is in no environment of this project; FAILOVER_PATRONI=PROGRAM runs it"),
    pytest.mark.timeout(400),
]
#: Claims go on this much after the new leader takes writes.
GO_ON_SECONDS = 3.0
JOBS = 50
#: A leader that is cut off goes on beside the new one for so long; then its Patroni is back, and demotes it.
BESIDE_SECONDS = 5.0
FIRST_CLAIM = "SELECT min(at) FROM history WHERE kind = 'claimed' AND at > $1"


@pytest.fixture(scope="module")
async def cluster(run_directory: Path) -> AsyncIterator[Cluster]:
    async with cluster_in(run_directory / "patroni", Path(PATRONI)) as cluster:
        await migrate(cluster.url)
        yield cluster


async def switched_over(cluster: Cluster, leader: Node, _undo: ExitStack) -> None:
    await cluster.switch_over(leader)


async def killed(_cluster: Cluster, leader: Node, _undo: ExitStack) -> None:
    await leader.kill()


async def frozen(_cluster: Cluster, leader: Node, undo: ExitStack) -> None:
    undo.enter_context(standing_still(leader.processes(agent=True) + leader.processes(agent=False)))


async def cut_off(_cluster: Cluster, leader: Node, undo: ExitStack) -> None:
    """From the other nodes, as Patroni sees it: its PostgreSQL goes on, and takes statements."""
    undo.enter_context(standing_still(leader.processes(agent=True)))


@pytest.mark.parametrize("fault", [switched_over, killed, frozen, cut_off])
async def test_patroni_fails_over_and_nothing_that_was_acknowledged_is_lost_or_charged(
    cluster: Cluster, tmp_path: Path, fault: Callable[[Cluster, Node, ExitStack], Awaitable[None]]
) -> None:
    old = await cluster.whole()
    async with connected(cluster.settings(), "test") as connection:
        await connection.execute("TRUNCATE job, event, failure CASCADE")
    with ExitStack() as undo:
        async with worker_of(cluster, tmp_path):
            submissions = Submissions(cluster)
            await submissions.reach(JOBS)
            began = time.time()
            promoting = asyncio.create_task(cluster.promoted(other_than=old))
            await fault(cluster, old, undo)
            promoted = await promoting
            goes_on = promoted
            if fault is cut_off:
                await asyncio.sleep(BESIDE_SECONDS)
                undo.close()
                goes_on = await cluster.demoted(old)
            await submissions.reach(len(submissions.acknowledged) + JOBS)
            await submissions.stop()
            undo.close()
            await old.start()
            await all_ended(cluster)
    async with connected(cluster.settings(), "test") as connection:
        first = await connection.fetchval(FIRST_CLAIM, datetime.fromtimestamp(goes_on, UTC))
    waited = first.timestamp() - goes_on
    print(  # noqa: T201
        f"\n{fault.__name__}: a new leader after {promoted - began:.1f} s, claims {waited:.2f} s later;"
        f" {len(submissions.acknowledged)} jobs"
    )
    await nothing_was_charged(cluster, submissions.acknowledged)
    assert waited < GO_ON_SECONDS
