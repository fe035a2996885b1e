"""`debounce`: submissions that follow each other quickly are one run, with the arguments of the last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from leasehold import App, DeclarationError, Limit, Unique
from leasehold.db.database import Connection
from leasehold.domain.errors import Invalid
from tests.app.conftest import Serve

SECONDS = 60.0
HOUR = timedelta(hours=1)
app = App("debounced")
went: list[int] = []
go_on = asyncio.Event()


class Page(BaseModel):
    path: str
    version: int = 0


@app.task(debounce=HOUR, unique=Unique(by=("path",)))
async def publish(page: Page) -> int:
    return page.version


@app.task(debounce=timedelta(seconds=0.3), unique=Unique(by=("path",)))
async def publish_soon(page: Page) -> int:
    went.append(page.version)
    await go_on.wait()
    return page.version


@app.task(debounce=HOUR, limit=Limit(at_most=1))
async def limited(n: int) -> int:
    return n


@app.task(debounce=HOUR, unique=Unique(by=("path",)), limit=Limit(at_most=1, by="/customer"))
async def deliver(path: str, customer: str) -> None: ...


@pytest.fixture(autouse=True)
def _use(using: Callable[..., App]) -> None:
    using(app)
    went.clear()
    go_on.clear()


async def row_of(connection: Connection, run: Any) -> dict[str, Any]:
    row = await connection.fetchrow(
        "SELECT j.params, j.deadline_at, t.available_at, t.status, r.scheduled_at, g.ready_at FROM job j"
        " JOIN task t ON t.job_id = j.id JOIN run r ON r.job_id = j.id LEFT JOIN gate_job g ON g.job_id = j.id"
        " WHERE j.id = $1",
        run.id,
    )
    assert row is not None
    return dict(row)


async def test_a_later_submission_gives_its_arguments_and_its_time_to_the_run_that_waits(
    connection: Connection,
) -> None:
    run = await publish.asubmit(Page(path="/a", version=1))
    await connection.execute(
        "UPDATE task SET available_at = clock_timestamp() + interval '1 s' WHERE job_id = $1", run.id
    )
    assert await publish.asubmit(Page(path="/a", version=2)) == run
    row = await row_of(connection, run)
    assert row["params"] == {"path": "/a", "version": 2}
    assert row["available_at"] - datetime.now(UTC) > timedelta(minutes=59)
    assert row["scheduled_at"] == row["available_at"]
    assert await publish.asubmit(Page(path="/b", version=1)) != run
    assert await publish.asubmit(Page(path="/a", version=3), key="other") != run
    assert await connection.fetchval("SELECT count(*) FROM job") == 3


async def test_a_run_that_takes_other_arguments_waits_at_the_limit_of_their_values(connection: Connection) -> None:
    run = await deliver.asubmit("/a", "alice")
    assert await deliver.asubmit("/a", "bob") == run
    other = await deliver.asubmit("/b", "bob")
    found = await connection.fetch(
        "SELECT g.job_id, g.key, g.ready_at = t.available_at AS at_start, g.owner, g.priority = j.priority AS as_before"
        " FROM gate_job g JOIN task t ON t.job_id = g.job_id JOIN job j ON j.id = g.job_id"
    )
    rows = {row["job_id"]: row for row in found}
    assert len(found) == len(rows) == 2
    assert rows[run.id]["key"] == rows[other.id]["key"]
    assert (rows[run.id]["at_start"], rows[run.id]["as_before"]) == (True, True)
    assert rows[run.id]["owner"] == rows[other.id]["owner"]


async def test_submissions_of_one_call_are_one_run_with_the_last_arguments(connection: Connection) -> None:
    runs = await publish.asubmit_many([Page(path="/a", version=n) for n in range(5)] + [Page(path="/b")])
    assert len(set(runs[:5])) == 1
    assert len(set(runs)) == 2
    assert (await row_of(connection, runs[0]))["params"]["version"] == 4
    assert await connection.fetchval("SELECT count(*) FROM job") == 2


async def test_a_run_that_has_started_takes_no_more_arguments(connection: Connection, serve: Serve) -> None:
    first = await publish_soon.asubmit(Page(path="/a", version=1))
    assert await publish_soon.asubmit(Page(path="/a", version=2)) == first  # no worker could start it in between
    async with serve(app), asyncio.timeout(SECONDS):
        while not went:
            await asyncio.sleep(0.01)
        second = await publish_soon.asubmit(Page(path="/a", version=3))
        assert second != first
        go_on.set()
        assert (await first, await second) == (2, 3)
    assert went == [2, 3]


async def test_a_run_that_waits_for_its_next_attempt_has_started_too(connection: Connection) -> None:
    first = await publish.asubmit(Page(path="/a", version=1))
    await connection.execute("UPDATE task SET epoch = 1 WHERE job_id = $1", first.id)  # it snoozes after a claim
    second = await publish.asubmit(Page(path="/a", version=2))
    assert second != first
    assert (await row_of(connection, first))["params"]["version"] == 1
    assert await publish.asubmit(Page(path="/a", version=3)) == second


async def test_submissions_at_the_same_time_make_one_run(connection: Connection) -> None:
    runs = await asyncio.gather(*(publish.asubmit(Page(path="/a", version=n)) for n in range(20)))
    assert len(set(runs)) == 1
    assert await connection.fetchval("SELECT count(*) FROM job") == 1


async def test_a_run_that_waits_at_a_limit_is_admitted_when_its_time_has_come(connection: Connection) -> None:
    run = await limited.asubmit(1)
    await connection.execute(
        "UPDATE gate_job SET ready_at = clock_timestamp() + interval '1 min' WHERE job_id = $1", run.id
    )
    assert await limited.asubmit(1) == run
    row = await row_of(connection, run)
    assert row["status"] == "blocked"
    assert row["ready_at"] == row["available_at"] > datetime.now(UTC) + timedelta(minutes=59)


async def test_another_tenants_run_is_another_run(using: Callable[..., App]) -> None:
    run = await publish.asubmit(Page(path="/a"))
    using(app, tenant="other")
    assert await publish.asubmit(Page(path="/a")) != run


async def test_a_delay_beside_the_debounce_is_refused() -> None:
    with pytest.raises(Invalid, match="debounce"):
        await publish.asubmit(Page(path="/a"), delay=HOUR)


@pytest.mark.parametrize("seconds", [0, -1, 10**9])
def test_a_debounce_of_no_time_is_refused_at_import(seconds: int) -> None:
    def nothing() -> None: ...

    with pytest.raises(DeclarationError, match=r"test_debounce\.py:\d+: debounce"):
        App("a").task(debounce=timedelta(seconds=seconds))(nothing)
