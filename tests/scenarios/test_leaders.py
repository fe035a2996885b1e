"""The leader stands still, or is cut off from the database, and wakes up: its work and its duties pass on meanwhile."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from leasehold.transitions.jobs import NewJob, submit
from tests.broker.wire import Wire
from tests.failover.work import napping
from tests.scenarios.fleet import Fleet, Process

LEASE, SWEEP, NAP = 3.0, 0.5, 2.0
TERMS: dict[str, Any] = {
    "pipelines": "tests.failover.work:pipelines",
    "lease_seconds": LEASE,
    "renew_seconds": 1,
    "trust_margin_seconds": 1,
    "sweep_seconds": SWEEP,
}
#: docs/operations/failover.md: the leadership lasts three sweeps, and a candidate tries twice a second.
DUTIES_PASS_ON = 3 * SWEEP + 0.5
LEASES_PASS_ON = LEASE + 2 * SWEEP
#: What a busy machine adds: each of several processes may stand still for seconds.
SLACK = 15.0


@asynccontextmanager
async def still(leader: Process, wire: Wire, how: str) -> AsyncIterator[None]:
    if how == "stopped":
        leader.signal(signal.SIGSTOP)
    else:
        wire.freeze()
    try:
        yield
    finally:
        leader.signal(signal.SIGCONT)
        wire.thaw()


async def leader_of(fleet: Fleet) -> int | None:
    """The process that leads."""
    pid: int | None = await fleet.rows.connection.fetchval(
        "SELECT w.pid FROM leadership l JOIN worker w ON w.id = l.owner"
        " WHERE l.role = 'sweeper' AND l.until > clock_timestamp()"
    )
    return pid


async def jobs_of(fleet: Fleet, worker: Process) -> list[UUID]:
    """The jobs of which the worker runs a step now."""
    rows = await fleet.rows.connection.fetch(
        "SELECT t.job_id FROM task t JOIN worker w ON w.id = t.lease_owner WHERE t.status = 'running' AND w.pid = $1",
        worker.pid,
    )
    return [row["job_id"] for row in rows]


async def ended(fleet: Fleet, job: UUID) -> bool:
    return bool(await fleet.rows.connection.fetchval("SELECT finished_at IS NOT NULL FROM job WHERE id = $1", job))


@pytest.mark.parametrize("how", ["stopped", "cut off"])
async def test_what_a_silent_leader_holds_passes_on_in_time_and_it_does_no_harm_when_it_wakes(
    fleet: Fleet, how: str
) -> None:
    wire = Wire(fleet.settings.database_url.get_secret_value())
    await wire.open()
    leader = await fleet.worker(**TERMS, database_url=wire.url)
    connection = fleet.rows.connection
    await fleet.until(lambda: _leads(fleet, leader))
    other = await fleet.worker(**TERMS)
    new: list[NewJob] = []
    while not (held_by_leader := await jobs_of(fleet, leader)):  # either worker may take a job
        new.append(NewJob(napping, "t", {"seconds": NAP}))
        await submit(connection, new[-1:])
        await fleet.until(lambda: _runs(fleet, new[-1].id))
    (held, *_) = held_by_leader

    late = NewJob(napping, "t", not_before=datetime.now(UTC) + timedelta(hours=1), deadline_at=datetime.now(UTC))
    async with still(leader, wire, how):
        since = time.monotonic()
        await submit(connection, [late])
        await fleet.until(lambda: _leads(fleet, other))
        await fleet.until(lambda: ended(fleet, late.id))
        duties = time.monotonic() - since
        await fleet.until(lambda: ended(fleet, held))
        work = time.monotonic() - since - NAP
        events = await fleet.rows.events(held)
        before_it_wakes = await connection.fetchval("SELECT clock_timestamp()")
        until = await connection.fetchval("SELECT until FROM leadership WHERE role = 'sweeper'")

    async def wakes() -> bool:
        """It takes no leadership that lasts. That of the other ends if a busy machine keeps it from renewing it."""
        nonlocal until
        row = await connection.fetchrow(
            "SELECT w.pid, l.until, $1 < clock_timestamp() AS ended"
            " FROM leadership l JOIN worker w ON w.id = l.owner WHERE l.role = 'sweeper'",
            until,
        )
        assert row is not None
        assert row["pid"] == other.pid or row["ended"]
        until = row["until"] if row["pid"] == other.pid else until
        return await _is_seen_after(fleet, leader, before_it_wakes)

    await fleet.until(wakes, leader)
    assert await fleet.rows.events(held) == events

    async def all_have_ended() -> bool:
        return await wakes() and all([await ended(fleet, job.id) for job in new])

    await fleet.until(all_have_ended)
    for job in new:
        await fleet.assert_done_once(job.id)
    print(f"\nthe leader is {how}: duties pass on after {duties:.1f} s, its task after {work:.1f} s")  # noqa: T201
    assert duties < DUTIES_PASS_ON + SLACK
    assert work < LEASES_PASS_ON + SLACK

    await other.kill()
    again = NewJob(napping, "t")
    await submit(connection, [again])
    await fleet.until(lambda: ended(fleet, again.id), leader)
    await fleet.assert_done_once(again.id)
    await fleet.until(lambda: _leads(fleet, leader), leader)  # the leadership of the dead worker ends by time
    await wire.close()


async def _is_seen_after(fleet: Fleet, process: Process, moment: datetime) -> bool:
    return bool(
        await fleet.rows.connection.fetchval("SELECT seen_at > $2 FROM worker WHERE pid = $1", process.pid, moment)
    )


async def _runs(fleet: Fleet, job: UUID) -> bool:
    return (await fleet.rows.statuses(job))["nap"] != "pending"


async def _leads(fleet: Fleet, process: Process) -> bool:
    return await leader_of(fleet) == process.pid
